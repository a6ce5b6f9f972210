"""What is wrong with a request is answered by the right code in clear words, and the next request is served.

User-needs R59, R68 to R71, R90 and R91.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import grpc
import pytest

from jetserve.request import SamplingParams
from jetserve.server.protos import inference_pb2 as pb
from tests.server.numbers import MAX_LENGTH, VOCAB_SIZE

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
LIMIT = 1 << 16  # of a message, in this file


def ids(*tokens, **params):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), params=pb.SamplingParams(**params))


def ask(**fields):
    return pb.GenerateRequest(text="5 6", params=pb.SamplingParams(max_tokens=2), **fields)


class Case(NamedTuple):
    """What is sent, and how it is answered."""

    name: str
    request: pb.GenerateRequest | bytes
    words: str
    code: grpc.StatusCode = INVALID


CASES = [
    # the prompt
    Case("nothing", b"", "has no prompt"),
    Case("params only", pb.GenerateRequest(params=pb.SamplingParams(max_tokens=1)), "has no prompt"),
    Case("no ids", pb.GenerateRequest(token_ids=pb.TokenIds()), "the prompt has no tokens"),
    Case("empty text, no BOS", pb.GenerateRequest(text="", add_special_tokens=False), "the prompt has no tokens"),
    Case("id is vocab size", ids(1, VOCAB_SIZE), f"holds {VOCAB_SIZE}, outside the vocabulary"),
    Case("negative id", ids(-5), "holds -5, outside"),
    Case("garbage id", ids(1, 5279552648203111001), "holds 5279552648203111001, outside"),
    Case("id that is 5 in 32 bits", ids(2**32 + 5), "holds 4294967301, outside"),
    Case("prompt of the whole context", ids(*[1] * MAX_LENGTH), f"has {MAX_LENGTH} tokens, at most {MAX_LENGTH - 1}"),
    Case("long text", pb.GenerateRequest(text="7 " * 20_000), "has 20001 tokens, at most 255"),
    # bytes
    Case("text is not UTF-8", b"\x0a\x02\xc3\x28", "must be UTF-8"),
    Case("stop is not UTF-8", b"\x0a\x01\x35\x1a\x04\x62\x02\xc3\x28", "must be UTF-8"),
    Case("truncated", ask().SerializeToString()[:-1], "are not a jetserve.v1.GenerateRequest"),
    Case("no protobuf", b"\xff" * 9, "are not a jetserve.v1.GenerateRequest"),
    Case("wrong wire type", b"\x08\x05", "does not know: [1]"),
    Case("unknown field", ask().SerializeToString() + b"\xc0\x3e\x01", "does not know: [1000]"),
    Case("unknown parameter", b"\x0a\x01\x35\x1a\x03\xc0\x3e\x01", "SamplingParams has fields this server does not"),
    Case("huge message", pb.GenerateRequest(text="x" * LIMIT), "server.max_message_bytes", EXHAUSTED),
    # numbers
    *(
        Case(f"{name}={value}", ids(5, **{name: value}), f"{name}")
        for name, values in {
            "max_tokens": (0, -1),
            "min_tokens": (-1, 300),
            "temperature": (math.nan, math.inf, -math.inf, -0.1, 100.5),
            "top_k": (-2,),
            "top_p": (0.0, 1.5, math.nan, -1.0),
            "min_p": (-0.1, 1.1, math.nan),
            "presence_penalty": (2.1, -2.1, math.nan),
            "frequency_penalty": (2.1, -2.1, math.inf),
            "repetition_penalty": (0.0, -1.0, math.nan, 101.0),
            "logprobs": (-1, 21),
            "n": (0, -1, 65),
        }.items()
        for value in values
    ),
    Case("min above max", ids(5, min_tokens=5, max_tokens=4), "min_tokens=5 must not exceed max_tokens=4"),
    # lists
    Case("bias of an unknown id", ids(5, logit_bias={VOCAB_SIZE: 1.0}), "logit_bias holds 1000, outside"),
    Case("bias of a negative id", ids(5, logit_bias={-1: 1.0}), "logit_bias=-1"),
    Case("bias too large", ids(5, logit_bias={5: 1e9}), "logit_bias[5]=1000000000.0"),
    Case("bias not a number", ids(5, logit_bias={5: math.nan}), "logit_bias[5] must be finite"),
    Case("too many biases", ids(5, logit_bias=dict.fromkeys(range(400), 1.0)), "name 400 tokens, at most 300"),
    Case("empty stop", ids(5, stop=[""]), "stop must hold non-empty strings"),
    Case("17 stops", ids(5, stop=[str(i) for i in range(17)]), "stop has 17 strings, at most 16"),
    Case("long stop", ids(5, stop=["x" * 1025]), "1025 characters, at most 1024"),
    Case("unknown stop id", ids(5, stop_token_ids=[VOCAB_SIZE]), "stop_token_ids holds 1000, outside"),
    Case("negative stop id", ids(5, stop_token_ids=[-1]), "stop_token_ids=-1"),
    Case("17 stop ids", ids(5, stop_token_ids=range(17)), "at most 16"),
    Case("nothing allowed", ids(5, allowed_token_ids=pb.TokenIds()), "allowed_token_ids is empty"),
    Case("unknown id allowed", ids(5, allowed_token_ids=pb.TokenIds(ids=[5000])), "allowed_token_ids holds 5000"),
    # the call
    *(
        Case(f"timeout {value}", ask(timeout_seconds=value), "timeout_seconds")
        for value in (0.0, -1.0, math.nan, math.inf)
    ),
    Case("priority of 33 bits", ask(priority=2**31), "priority=2147483648"),
    Case("long request id", ask(request_id="x" * 257), "at most 256 characters"),
    Case("request id with a newline", ask(request_id="a\nb"), "printable"),
]


async def send(running, request, **call):
    """All messages of a Generate, from raw bytes."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
    return [pb.GenerateResponse.FromString(message) async for message in rpc(data, **call)]


def test_there_are_enough_cases():
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


def test_each_bad_request_is_refused_in_clear_words_and_the_next_is_served(serve, run):
    async def check():
        wrong = {}
        async with serve(settings=[f"server.max_message_bytes={LIMIT}"]) as running:
            for case in CASES:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send(running, case.request, timeout=20)
                error = caught.value
                said = error.details() or ""
                if error.code() is not case.code or case.words not in said or "Traceback" in said or "\n" in said:
                    wrong[case.name] = (error.code(), said)
                (answer,) = await running.client.generate([5], SamplingParams(max_tokens=2))
                assert answer.token_ids == (6, 7), case.name
            await running.until_idle()
            assert await running.metric("vllm:request_success_total", finished_reason="length") == len(CASES)
        assert wrong == {}

    run(check())


def test_edges_that_are_allowed_are_served(serve, run):
    async def check():
        edges = [
            ids(*[1] * (MAX_LENGTH - 1)),
            ids(5, max_tokens=10**9, top_k=-1),
            ids(5, max_tokens=1, temperature=1e-6, top_p=1e-6),
            ids(5, max_tokens=1, stop=["x" * 1024], logit_bias={5: 100.0}, n=64),
            ids(5, max_tokens=1, logprobs=20, seed=-(2**63)),
            pb.GenerateRequest(text="", params=pb.SamplingParams(max_tokens=1)),  # BOS alone
        ]
        async with serve() as running:
            for request in edges:
                last = (await send(running, request))[-1]
                assert last.finish_reason == pb.FINISH_REASON_LENGTH

    run(check())


def test_a_message_far_above_the_limit_is_refused_by_the_settings_name_too(serve, run):
    async def check():
        async with serve(settings=[f"server.max_message_bytes={LIMIT}"]) as running:
            with pytest.raises(grpc.aio.AioRpcError, match=r"server\.max_message_bytes") as caught:
                await send(running, pb.GenerateRequest(text="x" * (8 << 20)))
            assert caught.value.code() is EXHAUSTED

    run(check())


def test_the_default_limit_takes_a_prompt_of_600k_ids(serve, run):
    async def check():
        async with serve() as running:
            with pytest.raises(grpc.aio.AioRpcError, match="has 600000 tokens, at most 255"):
                await send(running, ids(*[7] * 600_000))

    run(check())


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("Abort", b"", "request_id is empty"),
        ("Abort", b"\xff", "are not a jetserve.v1.AbortRequest"),
        ("GetModelInfo", b"\x08\x01", "does not know"),
        ("GetServerStatus", b"\xff", "are not a jetserve.v1.GetServerStatusRequest"),
    ],
)
def test_other_rpcs_refuse_bad_bytes_too(serve, run, method, data, words):
    async def check():
        async with serve() as running:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await running.channel.unary_unary(f"/jetserve.v1.Inference/{method}")(data)
            assert caught.value.code() is INVALID

    run(check())


def test_an_unknown_method_is_unimplemented(serve, run):
    async def check():
        async with serve() as running:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.channel.unary_unary("/jetserve.v1.Inference/Guess")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(check())


def test_a_bug_of_ours_is_internal_without_its_trace_and_logged(serve, run, monkeypatch, caplog):
    async def check():
        async with serve() as running:
            monkeypatch.setattr(type(running.server.orchestrator), "submit", _broken)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(running, ask())
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert (
                caught.value.details()
                == "jetserve.v1.Inference/Generate failed inside the server; its log has the details"
            )
            monkeypatch.undo()
            assert (await running.client.generate([5], SamplingParams(max_tokens=1)))[0].token_ids == (6,)

    run(check())
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


async def _broken(*_args: object, **_given: object) -> None:
    raise ZeroDivisionError("secret")
