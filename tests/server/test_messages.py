"""Messages carry every field both ways, and what is committed is what protoc makes of the .proto files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from jetserve.errors import InvalidRequest
from jetserve.request import Delta, FinishReason, SamplingParams, TokenLogprobs, Usage
from jetserve.server import messages
from jetserve.server.protos import inference_pb2, jetstream_pb2
from jetserve.server.protos import inference_pb2 as pb
from tests.links import make_links

EVERY_PARAMETER = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.1,
    top_k=5,
    top_p=0.3,
    min_p=0.05,
    presence_penalty=0.7,
    frequency_penalty=-0.7,
    repetition_penalty=1.3,
    logit_bias={3: -1.5, 4: 100.0},
    seed=2**63 + 5,
    stop=("a", "ä"),
    stop_token_ids=(1, 2),
    ignore_eos=True,
    include_stop=True,
    logprobs=3,
    allowed_token_ids=(3, 4, 5),
    skip_special_tokens=False,
    n=2,
)


def test_every_parameter_is_a_field_of_the_message():
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == ours
    default = SamplingParams()
    assert [f for f in ours if getattr(EVERY_PARAMETER, f) == getattr(default, f)] == []


def test_every_parameter_comes_through():
    wire = messages.write_params(EVERY_PARAMETER).SerializeToString()
    back = messages.read_params(messages.parse(pb.SamplingParams, wire))
    assert back.seed is not None
    assert back.seed % 2**64 == 2**63 + 5
    assert dataclasses.replace(back, seed=2**63 + 5) == EVERY_PARAMETER


def test_defaults_are_not_sent():
    assert messages.write_params(SamplingParams()).SerializeToString() == b""
    assert messages.read_params(pb.SamplingParams()) == SamplingParams()


def test_a_field_set_to_zero_is_not_a_field_that_is_not_set():
    params = messages.read_params(pb.SamplingParams(temperature=0.0, logprobs=0))
    assert params == SamplingParams(temperature=0.0, logprobs=0)


def test_an_empty_list_of_allowed_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="allowed_token_ids is empty"):
        messages.read_params(pb.SamplingParams(allowed_token_ids=pb.TokenIds()))


@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_is_the_same_modulo_64_bits(seed):
    back = messages.read_params(messages.write_params(SamplingParams(seed=seed)))
    assert back.seed is not None
    assert (back.seed - seed) % 2**64 == 0


DELTAS = [
    Delta(0, "", ()),
    Delta(3, "ä\n", (5, 6)),
    Delta(0, "x", (5,), (TokenLogprobs(5, -0.5, ((5, -0.5), (6, -2.0))),)),
    Delta(0, "x", (5,), (), FinishReason.STOP, "stop here", Usage(3, 4, 1)),
    Delta(0, "x", (5,), (), FinishReason.STOP, 0, Usage(3, 4)),
    Delta(1, "", (5,), (), FinishReason.LENGTH, None, Usage(3, 4)),
    Delta(0, "", (), (), FinishReason.ABORT, None, Usage(3, 0)),
]


@pytest.mark.parametrize("delta", DELTAS)
def test_a_delta_comes_through(delta):
    wire = messages.compose(delta).SerializeToString()
    assert messages.decompose(pb.GenerateResponse.FromString(wire)) == delta


def test_usage_is_sent_with_the_end_of_a_sample_only():
    assert not messages.compose(Delta(0, "x", (5,), usage=Usage(3, 1))).HasField("usage")


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 1.5, "5", None])
def test_the_client_refuses_ids_that_the_wire_cannot_carry(token):
    with pytest.raises(InvalidRequest, match="64 bits"):
        messages.write_token_ids([token])


def test_the_client_refuses_numbers_that_the_wire_cannot_carry():
    with pytest.raises(InvalidRequest, match="do not fit the wire"):
        messages.write_params(SamplingParams(max_tokens=2**70))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff", "are not a jetserve.v1.GenerateRequest"),
        (b"\x0a\x05ab", "are not a jetserve.v1.GenerateRequest"),
        (b"\x0a\x02\xc3\x28", "UTF-8"),
        (b"\xc0\x3e\x01", r"does not know: \[1000\]"),
        (
            pb.GenerateRequest(params=pb.SamplingParams()).SerializeToString()[:-1] + b"\x03\xc0\x3e\x01",
            "SamplingParams",
        ),
    ],
)
def test_bytes_that_are_no_request_are_refused(data, words):
    with pytest.raises(InvalidRequest, match=words):
        messages.parse(pb.GenerateRequest, data)


def test_float_values_keep_all_their_bits():
    assert math.isnan(pb.SamplingParams.FromString(pb.SamplingParams(top_p=math.nan).SerializeToString()).top_p)
    assert pb.SamplingParams.FromString(pb.SamplingParams(top_p=0.1).SerializeToString()).top_p == 0.1


@pytest.mark.parametrize("module", [inference_pb2, jetstream_pb2], ids=["inference", "jetstream"])
def test_committed_code_is_what_the_proto_file_says(module, tmp_path: Path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    links, out = tmp_path / "links", tmp_path / "descriptors"
    make_links(links=links)
    name = module.DESCRIPTOR.name
    assert protoc.main(["protoc", f"-I{links}", f"--descriptor_set_out={out}", name]) == 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0].SerializeToString())
    said, committed = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    pool.FindFileByName(name).CopyToProto(said)
    module.DESCRIPTOR.CopyToProto(committed)
    for proto in (said, committed):
        _forget_json_names(proto)
    assert said == committed, "run `make proto`"


def _forget_json_names(message):
    """protoc writes them into descriptor sets and not into code."""
    for field in getattr(message, "field", ()):
        field.ClearField("json_name")
    for inner in (*getattr(message, "message_type", ()), *getattr(message, "nested_type", ())):
        _forget_json_names(inner)
