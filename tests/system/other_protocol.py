"""fl-client with another protocol number, FL_TEST_PROTOCOL.

As a fork, it has imported everything already, so the number is changed in every module that has imported it.
"""

import os
import sys

from fedring.client.main import main

if __name__ == "__main__":
    for name, module in list(sys.modules.items()):
        if name.startswith("fedring.") and hasattr(module, "PROTOCOL"):
            vars(module)["PROTOCOL"] = int(os.environ["FL_TEST_PROTOCOL"])
    main()
