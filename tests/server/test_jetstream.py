"""JetStream's own clients are understood: stubs made here from its published field numbers, in a pool of their own."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.server.numbers import BOS, EOS, VOCAB_SIZE

# shared/protocols.md 2.7 in protoc's own terms: (name, number, type, label, oneof).
_FIELD = descriptor_pb2.FieldDescriptorProto
_INT32, _STRING, _BOOL, _FLOAT = _FIELD.TYPE_INT32, _FIELD.TYPE_STRING, _FIELD.TYPE_BOOL, _FIELD.TYPE_FLOAT


def _message(parent, name, *fields, oneofs=()):
    made = parent.add(name=name)
    for oneof in oneofs:
        made.oneof_decl.add(name=oneof)
    for field_name, number, kind, *more in fields:
        field = made.field.add(name=field_name, number=number, label=_FIELD.LABEL_OPTIONAL)
        if isinstance(kind, str):
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, kind
        else:
            field.type = kind
        if "repeated" in more:
            field.label = _FIELD.LABEL_REPEATED
        elif more:
            field.oneof_index = more[0]
    return made


def _stubs():
    file = descriptor_pb2.FileDescriptorProto(name="theirs.proto", package="jetstream_proto", syntax="proto3")
    request = _message(
        file.message_type,
        "DecodeRequest",
        ("max_tokens", 4, _INT32),
        ("text_content", 5, ".jetstream_proto.DecodeRequest.TextContent", 0),
        ("token_content", 6, ".jetstream_proto.DecodeRequest.TokenContent", 0),
        ("metadata", 7, ".jetstream_proto.DecodeRequest.Metadata", 1),
        ("num_samples", 8, _INT32),
        ("lora_adapter_id", 9, _STRING),
        ("has_bos", 10, _BOOL),
        oneofs=("content", "metadata_optional"),
    )
    _message(request.nested_type, "TextContent", ("text", 1, _STRING))
    _message(request.nested_type, "TokenContent", ("token_ids", 1, _INT32, "repeated"))
    _message(request.nested_type, "Metadata", ("start_time", 1, _FLOAT))
    response = _message(
        file.message_type,
        "DecodeResponse",
        ("initial_content", 2, ".jetstream_proto.DecodeResponse.InitialContent", 0),
        ("stream_content", 3, ".jetstream_proto.DecodeResponse.StreamContent", 0),
        oneofs=("content",),
    )
    _message(response.nested_type, "InitialContent")
    stream = _message(
        response.nested_type,
        "StreamContent",
        ("samples", 1, ".jetstream_proto.DecodeResponse.StreamContent.Sample", "repeated"),
    )
    _message(stream.nested_type, "Sample", ("text", 1, _STRING), ("token_ids", 2, _INT32, "repeated"))
    _message(file.message_type, "HealthCheckRequest")
    _message(file.message_type, "HealthCheckResponse", ("is_live", 1, _BOOL))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("DecodeRequest", "DecodeResponse", "HealthCheckRequest", "HealthCheckResponse")
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jetstream_proto.{name}")) for name in names]


DecodeRequest, DecodeResponse, HealthCheckRequest, HealthCheckResponse = _stubs()


async def decode(running, **fields):
    """The stream content of every message."""
    rpc = running.channel.unary_stream(
        "/jetstream_proto.Orchestrator/Decode", DecodeRequest.SerializeToString, DecodeResponse.FromString
    )
    messages = [message async for message in rpc(DecodeRequest(**fields))]
    assert {message.WhichOneof("content") for message in messages} == {"stream_content"}
    return [message.stream_content.samples for message in messages]


def test_tokens_in_token_ids_out_with_empty_text(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            contents = await decode(running, token_content={"token_ids": [5, 6]}, max_tokens=20)
            assert {len(samples) for samples in contents} == {1}
            assert [t for samples in contents for t in samples[0].token_ids] == list(range(7, 27))
            assert {samples[0].text for samples in contents} == {""}
            assert len(contents) > 3

    run(check())


def test_text_in_text_out(serve, run):
    async def check():
        async with serve() as running:
            contents = await decode(
                running, text_content={"text": "5 6"}, max_tokens=3, metadata={"start_time": 1.5}, num_samples=1
            )
            assert "".join(samples[0].text for samples in contents) == " 7 8 9"

    run(check())


def test_one_sample_is_greedy_and_bos_is_put_in_front_unless_it_is_there(serve, run):
    async def check():
        async with serve() as running:
            await decode(running, text_content={"text": "5"}, max_tokens=1)
            await decode(running, text_content={"text": "5"}, max_tokens=1, has_bos=True)
            plans = running.executor.plans
            assert [chunk.token_ids for plan in plans for chunk in plan.chunks] == [(BOS, 5), (5,)]
            assert [a.params.temperature for plan in plans for a in plan.admissions] == [0.0, 0.0]

    run(check())


def test_every_message_has_all_samples(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            contents = await decode(running, token_content={"token_ids": [5]}, max_tokens=10, num_samples=3)
            assert {len(samples) for samples in contents} == {3}
            for index in range(3):
                assert [t for samples in contents for t in samples[index].token_ids] == list(range(6, 16))
            assert {a.params.temperature for plan in running.executor.plans for a in plan.admissions} == {1.0}

    run(check())


def test_without_max_tokens_it_runs_to_the_end_token(serve, run):
    async def check():
        async with serve() as running:
            contents = await decode(running, token_content={"token_ids": [EOS - 3]})
            assert [t for samples in contents for t in samples[0].token_ids] == [EOS - 2, EOS - 1, EOS]

    run(check())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "has no content"),
        ({"token_content": {"token_ids": []}}, "the prompt has no tokens"),
        ({"token_content": {"token_ids": [VOCAB_SIZE]}}, "outside the vocabulary"),
        ({"token_content": {"token_ids": [-1]}}, "holds -1, outside the vocabulary"),
        ({"text_content": {"text": "5"}, "lora_adapter_id": "mine"}, "lora_adapter_id='mine'"),
        ({"text_content": {"text": "5"}, "max_tokens": -1}, "max_tokens=-1"),
        ({"text_content": {"text": "5"}, "num_samples": -1}, "n=-1"),
    ],
)
def test_what_cannot_be_served_is_invalid_argument(serve, run, fields, words):
    async def check():
        async with serve() as running:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decode(running, **fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in caught.value.details()

    run(check())


def test_health_check_is_live_when_ready(serve, run):
    async def check():
        async with serve() as running:
            rpc = running.channel.unary_unary(
                "/jetstream_proto.Orchestrator/HealthCheck",
                HealthCheckRequest.SerializeToString,
                HealthCheckResponse.FromString,
            )
            assert (await rpc(HealthCheckRequest())).is_live

    run(check())


def test_fixed_bytes_on_the_wire(serve, run):
    """By hand, from the field numbers: max_tokens 4 = 2, token_content 6 { token_ids 1 = [5] }."""
    request = bytes([0x20, 2, 0x32, 3, 0x0A, 1, 5])

    async def check():
        async with serve(step_seconds=0.02) as running:
            rpc = running.channel.unary_stream("/jetstream_proto.Orchestrator/Decode")
            messages = [bytes(message) async for message in rpc(request)]
            # stream_content 3 { samples 1 { token_ids 2 = [6] } }, then [7]; or both at once to a slow reader
            assert messages in (
                [bytes([0x1A, 5, 0x0A, 3, 0x12, 1, 6]), bytes([0x1A, 5, 0x0A, 3, 0x12, 1, 7])],
                [bytes([0x1A, 6, 0x0A, 4, 0x12, 2, 6, 7])],
            )

    run(check())
