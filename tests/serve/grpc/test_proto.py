"""The committed code fits pallasite.proto, the configs in Python, and the lower bounds of our dependencies."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from google.protobuf import descriptor_pb2

import pallasite.serve.proto
from pallasite.serve.grpc.messages import FINISH_REASONS
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.types import GenerationConfig

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "serve" / "proto"


def test_generated_code_is_up_to_date(tmp_path: Path):
    """Generated anew it has the same descriptor, with any version of protoc."""
    out = tmp_path / "descriptors"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-Ipallasite/serve/proto={PROTO}",
            f"--descriptor_set_out={out}",
            str(PROTO / "pallasite.proto"),
        ],
        check=True,
    )
    [new] = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    for message in new.message_type:  # protoc fills these in, but not in the code that it writes
        for field in message.field:
            field.ClearField("json_name")
    assert new == committed
    stubs = (PROTO / "pallasite_pb2_grpc.py").read_text()
    for method in new.service[0].method:
        assert f"'/pallasite.v1.Pallasite/{method.name}'" in stubs


def test_generated_code_runs_with_our_lower_bounds():
    """Generated code refuses to run with libraries older than its generator."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(d.split(">=") for d in dependencies)

    def numbers(version: str) -> list[int]:
        return [int(n) for n in version.split(".")]

    grpc_version = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", (PROTO / "pallasite_pb2_grpc.py").read_text())
    protobuf_version = re.search(r"Protobuf Python Version: (.*)", (PROTO / "pallasite_pb2.py").read_text())
    assert grpc_version
    assert protobuf_version
    assert numbers(grpc_version[1])[:2] <= numbers(bounds["grpcio"])
    assert numbers(protobuf_version[1])[:2] <= numbers(bounds["protobuf"])


def test_generation_config_is_whole():
    """Every field of the Python class, in its order; scalars know whether they are set."""
    fields = pb.GenerationConfig.DESCRIPTOR.fields
    assert [f.name for f in fields] == [f.name for f in dataclasses.fields(GenerationConfig)]
    for field in fields:
        assert field.is_repeated or field.has_presence
        default = getattr(GenerationConfig(), field.name)
        if isinstance(default, float):
            assert field.type == field.TYPE_DOUBLE


def test_finish_reasons():
    assert sorted(FINISH_REASONS.values()) == [v for v in pb.FinishReason.values() if v]
    for name, value in FINISH_REASONS.items():
        assert pb.FinishReason.Name(value) == f"FINISH_REASON_{name.upper()}"


def test_the_proto_is_installed():
    """Users generate code for other languages from it."""
    folder = Path(pallasite.serve.proto.__file__).parent
    assert (folder / "pallasite.proto").read_text() == (PROTO / "pallasite.proto").read_text()
