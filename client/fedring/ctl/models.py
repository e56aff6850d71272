"""flctl models export."""

from pathlib import Path
from typing import Annotated

import typer

from fedring.ctl.access import connect
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, print_json, size
from fedring.ctl.paths import check_file


def export(
    version: Annotated[int, typer.Argument(min=0, help="The version; 0 = the newest.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")],
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a model version as safetensors, in its own dtypes."""
    check_file(out)
    with connect(server) as control:
        header = control.export_model(version, out)
    written = out.stat().st_size
    if output is Output.JSON:
        row = {"version": header.version, "digest": header.model_digest, "file": str(out), "bytes": written}
        return print_json(row)
    print(f"version {header.version}, {size(written)}, is in {out}")
