"""A downloaded model as a safetensors file."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedring.codec import CodecError, decode
from fedring.codec.schema import Vectors, parse_schema
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.train.tensors.download import BadModel, Download, OtherSchema
from fedring.v1 import federation_pb2 as fb


def write_model(stream: Iterable[fb.ModelBlob], path: Path, *, exact: bool = False) -> fb.ModelHeader:
    """Write the model of a stream to a safetensors file.

    Its length and its digest are checked before.

    Args:
        stream: The server's answer.
        path: The file.
        exact: Whether to add the rest that the encoding of downloads left out.

    Returns:
        The model's header.

    Raises:
        Failure: The model is damaged or cannot be decoded, or the file cannot be written.
    """
    from safetensors import SafetensorError

    from fedring.train.tensors.files import save_vectors  # imports torch, which most verbs do not need

    blobs = iter(stream)
    header = next(blobs, fb.ModelBlob()).header
    if exact and not header.exact:
        raise Failure("this fl-server is too old to export exact models: update it, or leave --exact out")
    try:
        schema = parse_schema(header.schema)
        export = _Export(header.model_digest, schema, None)
        export.begin(header)
        for blob in blobs:
            export.add(blob.chunk)
        vectors = export.finish().vectors
        if exact:
            export.add_rest(vectors)
    except (BadModel, OtherSchema, CodecError) as error:
        raise Failure(f"the model arrived damaged: {error}: try again", Exit.TRY_AGAIN) from error
    try:
        save_vectors(schema, vectors, path)
    except (OSError, SafetensorError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or error
        raise Failure(f"cannot write {path}: {why}") from error
    return header


class _Export(Download):
    """A model in full, with the rest that its encoding left out.

    The rest is the last packet, and the digest does not cover it.
    """

    def add_rest(self, vectors: Vectors) -> None:
        """Add the rest to the parameters, if there is one."""
        for packet, data in super()._packets():
            if packet.kind == fb.KIND_DELTA:
                values = vectors.parameters
                values += decode(data, name=packet.encoding, length=len(values))

    def _packets(self) -> Iterator[tuple[fb.Packet, memoryview]]:
        return ((packet, data) for packet, data in super()._packets() if packet.kind != fb.KIND_DELTA)
