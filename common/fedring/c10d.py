"""torch.distributed's stores and gradient buckets.

They are documented names of `torch.distributed`, but type checkers find them only in a private module.
"""

from typing import TYPE_CHECKING

__all__ = ["FileStore", "GradBucket", "HashStore", "PrefixStore", "Store", "TCPStore"]

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore, GradBucket, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, GradBucket, HashStore, PrefixStore, Store, TCPStore
