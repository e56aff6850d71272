"""The .proto files declare what protos/protocol.json lists, and every change to them is noticed."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tests.conftest import ROOT

import frozen
from fedring.rpc.contract import PROTOCOL
from generate import declared

PROTOS = ROOT / "protos"
BEFORE = """
syntax = "proto3";
package p;
service Calls {
  rpc Ask(Question) returns (Answer);
  rpc Listen(Question) returns (stream Answer);
}
service Others { rpc Ask(Question) returns (Answer); }
message Question {
  string name = 1;
  uint32 count = 2;
  repeated bytes parts = 3;
  optional double share = 4;
  map<string, double> figures = 5;
  Colour colour = 6;
  oneof what {
    Inner inner = 7;
    bool nothing = 8;
  }
  reserved 9, 11 to 13;
  reserved "old";
  message Inner { int64 at = 1; }
}
message Answer {}
message Unused { string word = 1; }
enum Colour {
  COLOUR_UNSPECIFIED = 0;
  COLOUR_RED = 1;
  COLOUR_BLUE = 2;
  reserved 5;
}
enum Shape { SHAPE_UNSPECIFIED = 0; }
"""

BROKEN = {
    "a call is removed": ("  rpc Ask(Question) returns (Answer);\n", "", "Ask (p.Question -> p.Answer) is gone"),
    "a call is renamed": ("rpc Listen", "rpc Hear", "has become Hear"),
    "a call takes something else": ("rpc Listen(Question)", "rpc Listen(Answer)", "has become Listen (p.Answer ->"),
    "a call returns something else": ("returns (stream Answer)", "returns (stream Question)", "-> stream p.Question"),
    "a call no longer streams": ("returns (stream Answer)", "returns (Answer)", "-> p.Answer)"),
    "a call takes a stream": ("rpc Listen(", "rpc Listen(stream ", "has become Listen (stream p.Question"),
    "a service is removed": ("service Others { rpc Ask(Question) returns (Answer); }", "", "service p.Others is gone"),
    "a message is removed": ("message Unused { string word = 1; }", "", "message p.Unused is gone"),
    "a message is renamed": ("message Unused", "message Used", "message p.Unused is gone"),
    "a field is removed": ("  uint32 count = 2;\n", "", "uint32 count = 2 is gone"),
    "a field of an inner message is removed": ("{ int64 at = 1; }", "{}", "p.Question.Inner: int64 at = 1 is gone"),
    "a field is renumbered": ("count = 2", "count = 14", "uint32 count = 2 has become uint32 count = 14"),
    "a field is renamed": ("count = 2", "number = 2", "uint32 count = 2 has become uint32 number = 2"),
    "a field has another type": ("uint32 count", "uint64 count", "uint32 count = 2 has become uint64 count = 2"),
    "a field has another enum": ("Colour colour", "Shape colour", "has become p.Shape colour = 6"),
    "a field is repeated": ("string name", "repeated string name", "has become repeated string name = 1"),
    "a field is no longer repeated": ("repeated bytes", "bytes", "repeated bytes parts = 3 has become bytes parts = 3"),
    "a field can be absent": ("string name", "optional string name", "has become optional string name = 1"),
    "a field cannot be absent": ("optional double", "double", "optional double share = 4 has become double share = 4"),
    "a map holds something else": (
        "map<string, double>",
        "map<string, float>",
        "has become map<string, float> figures = 5",
    ),
    "a map has other keys": (
        "map<string, double>",
        "map<uint32, double>",
        "has become map<uint32, double> figures = 5",
    ),
    "a field moves into a oneof": (
        "  uint32 count = 2;\n  repeated bytes parts = 3;\n",
        "  repeated bytes parts = 3; oneof new { uint32 count = 2; }\n",
        "uint32 count = 2 has become oneof new: uint32 count = 2",
    ),
    "a field leaves a oneof": (
        "    bool nothing = 8;\n  }\n",
        "  }\n  bool nothing = 8;\n",
        "oneof what: bool nothing = 8 has become bool nothing = 8",
    ),
    "a oneof is renamed": ("oneof what", "oneof which", "has become oneof which: bool nothing = 8"),
    "a reserved number is used": (
        "reserved 9, 11 to 13;",
        "reserved 9; bool yes = 12;",
        "bool yes = 12 takes what was reserved",
    ),
    "a reserved name is used": ('reserved "old";', "bool old = 10;", "bool old = 10 takes what was reserved"),
    "a number is no longer reserved": ("reserved 9, 11 to 13;", "reserved 11 to 13;", "9 is no longer reserved"),
    "fewer numbers are reserved": ("11 to 13;", "11 to 12;", "11 to 13 is no longer reserved"),
    "a name is no longer reserved": ('reserved "old";', "", "old is no longer reserved"),
    "an enum is removed": ("enum Shape { SHAPE_UNSPECIFIED = 0; }", "", "enum p.Shape is gone"),
    "a value is removed": ("  COLOUR_BLUE = 2;\n", "", "COLOUR_BLUE = 2 is gone"),
    "a value is renumbered": ("COLOUR_BLUE = 2", "COLOUR_BLUE = 3", "COLOUR_BLUE = 2 has become COLOUR_BLUE = 3"),
    "a value is renamed": ("COLOUR_BLUE", "COLOUR_GREEN", "COLOUR_BLUE = 2 has become COLOUR_GREEN = 2"),
    "a reserved value is used": ("reserved 5;", "COLOUR_GREY = 5;", "COLOUR_GREY = 5 takes what was reserved"),
    "the package has another name": ("package p;", "package q;", "service p.Calls is gone"),
}
"""For each change: the replaced text, the new text, and a part of the complaint."""

ADDED = {
    "a call": ("service Others {", "service Others { rpc New(Answer) returns (stream Answer);"),
    "a service": ("message Answer {}", "message Answer {} service New { rpc Ask(Question) returns (Answer); }"),
    "a message": ("message Answer {}", "message Answer {} message New { Answer answer = 1; }"),
    "a field": ("message Answer {}", "message Answer { string text = 1; }"),
    "a choice of a oneof": ("bool nothing = 8;", "bool nothing = 8; bool all = 14;"),
    "a oneof of new fields": ("message Answer {}", "message Answer { oneof a { bool b = 1; bool c = 2; } }"),
    "an enum": ("enum Shape", "enum New { NEW_UNSPECIFIED = 0; } enum Shape"),
    "a value": ("COLOUR_BLUE = 2;", "COLOUR_BLUE = 2; COLOUR_GREEN = 3;"),
    "a reserved number": ("reserved 9, 11 to 13;", "reserved 9 to 14;"),
    "a reserved name": ('reserved "old";', 'reserved "old", "older";'),
}
SAME = {
    "a comment": ("message Answer {}", "// It is what it is.\nmessage Answer {}"),
    "another order": ("  string name = 1;\n  uint32 count = 2;\n", "  uint32 count = 2;\n  string name = 1;\n"),
    "reserved numbers in parts": ("11 to 13;", "11, 12 to 13;"),
    "an option": ("uint32 count = 2;", "uint32 count = 2 [deprecated = true];"),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> frozen.Wire:
    """Return a wire that was made up for these tests."""
    return wire_of(BEFORE, tmp_path_factory.mktemp("before"))


def wire_of(text: str, folder: Path) -> frozen.Wire:
    """Return what a .proto file with this text declares."""
    (folder / "made_up.proto").write_text(text)
    return frozen.describe(declared(folder).file)


def changed(changes: tuple[str, ...], folder: Path) -> frozen.Wire:
    """Return the wire of `BEFORE` after a change. `changes` begins with the replaced text and the new text."""
    assert BEFORE.count(changes[0]) >= 1
    return wire_of(BEFORE.replace(changes[0], changes[1], 1), folder)


def generated() -> frozen.Wire:
    """Return what the generated modules declare. All programs use these modules."""
    files = []
    for path in sorted(PROTOS.rglob("*.proto")):
        module = importlib.import_module(".".join(path.relative_to(PROTOS).with_suffix("").parts) + "_pb2")
        files.append(FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(files[-1])
    return frozen.describe(files)


def test_the_generated_modules_declare_what_protocol_json_lists() -> None:
    kept = json.loads((ROOT / frozen.FILE).read_text())
    if why := frozen.complaint(kept, generated(), PROTOCOL):
        pytest.fail(why, pytrace=False)


def test_the_changelog_and_the_proto_file_name_the_number_of_the_protocol() -> None:
    assert re.search(rf"^\W*Protocol {PROTOCOL}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (named,) = re.findall(r"that the client speaks; now (\d+)\.", (PROTOS / "fedring/v1/federation.proto").read_text())
    assert int(named) == PROTOCOL


@pytest.mark.parametrize("what", BROKEN)
def test_a_removal_or_a_change_breaks_the_protocol(before: frozen.Wire, tmp_path: Path, what: str) -> None:
    now = changed(BROKEN[what], tmp_path)
    found = frozen.compare(before, now).broken
    assert any(BROKEN[what][2] in sentence for sentence in found), found
    kept = {"protocol": 7, **before}
    why = frozen.complaint(kept, now, 7)
    assert BROKEN[what][2] in why
    assert "raise PROTOCOL in common/fedring/rpc/contract.py" in why
    assert "`python protos/generate.py --freeze`" in why
    assert "name protocol 8 in CHANGELOG.md" in why
    with pytest.raises(frozen.Refused) as refused:
        frozen.freeze(kept, now, 7)
    assert str(refused.value) == why
    assert frozen.freeze(kept, now, 8) == {"protocol": 8, **now}


@pytest.mark.parametrize("what", ADDED)
def test_an_addition_must_be_listed_in_protocol_json(before: frozen.Wire, tmp_path: Path, what: str) -> None:
    now = changed(ADDED[what], tmp_path)
    changes = frozen.compare(before, now)
    assert not changes.broken
    assert changes.added
    kept = {"protocol": 7, **before}
    assert "To add is allowed. Run `python protos/generate.py --freeze`" in frozen.complaint(kept, now, 7)
    kept = frozen.freeze(kept, now, 7)
    assert not frozen.complaint(kept, now, 7)
    assert frozen.compare(kept, before).broken  # what was added must not be removed from now on


@pytest.mark.parametrize("what", SAME)
def test_a_difference_that_is_not_visible_on_the_wire_is_not_a_change(
    before: frozen.Wire, tmp_path: Path, what: str
) -> None:
    now = changed(SAME[what], tmp_path)
    assert json.dumps(now) == json.dumps(before)


def test_a_raised_number_must_be_written_to_protocol_json_and_never_falls(before: frozen.Wire) -> None:
    kept = {"protocol": 7, **before}
    assert "is of protocol 7: run `python protos/generate.py --freeze`" in frozen.complaint(kept, before, 8)
    assert frozen.freeze(kept, before, 8)["protocol"] == 8
    with pytest.raises(frozen.Refused, match="raise it"):
        frozen.freeze(kept, before, 6)
    assert frozen.freeze(None, before, 1)["protocol"] == 1


@pytest.mark.programs
def test_the_command_writes_the_file_and_refuses_to_break_the_protocol(tmp_path: Path) -> None:
    contract = tmp_path / frozen.CONTRACT
    shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    contract.parent.mkdir(parents=True)
    shutil.copy(ROOT / frozen.CONTRACT, contract)
    kept, proto = tmp_path / frozen.FILE, tmp_path / "protos" / "fedring" / "v1" / "peer.proto"
    whole = kept.read_text()
    kept.unlink()
    assert run(tmp_path) == ""
    assert kept.read_text() == whole
    proto.write_text(proto.read_text().replace("bytes padding = 2", "bytes filling = 2"))
    assert "bytes padding = 2 has become bytes filling = 2" in run(tmp_path)
    assert kept.read_text() == whole
    contract.write_text(contract.read_text().replace(f"PROTOCOL = {PROTOCOL}", f"PROTOCOL = {PROTOCOL + 1}"))
    assert run(tmp_path) == ""
    assert json.loads(kept.read_text())["protocol"] == PROTOCOL + 1
    assert "bytes filling" in kept.read_text()


def run(folder: Path) -> str:
    """Run the command in this copy of the repository. Returns why it refused; "" if it did not."""
    words = [sys.executable, *frozen.COMMAND.split()[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stderr if done.returncode else ""
