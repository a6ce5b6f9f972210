"""jetserve.v1 from end to end: exact streams, every parameter, many at once, slow readers."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jetserve.errors import InvalidRequest, Overloaded, RequestAborted
from jetserve.request import FinishReason, SamplingParams, TokenLogprobs, Usage
from jetserve.server.async_client import AsyncClient
from jetserve.server.protos import inference_pb2 as pb
from tests.server.numbers import BOS, EOS, MAX_LENGTH, SLOTS, VOCAB_SIZE


def test_text_in_text_out(serve, run):
    async def check():
        async with serve() as running:
            (answer,) = await running.client.generate("5 6 7", SamplingParams(max_tokens=4))
        assert answer.text == " 8 9 10 11"
        assert answer.token_ids == (8, 9, 10, 11)
        assert answer.prompt_token_ids == (BOS, 5, 6, 7)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.stop_reason is None
        assert answer.usage == Usage(prompt_tokens=4, completion_tokens=4)

    run(check())


def test_token_ids_are_taken_as_they_are(serve, run):
    async def check():
        async with serve() as running:
            (answer,) = await running.client.generate([5, 6, 7], SamplingParams(max_tokens=1))
            (without,) = await running.client.generate("5 6", SamplingParams(max_tokens=1), add_special_tokens=False)
        assert answer.prompt_token_ids == (5, 6, 7)
        assert without.prompt_token_ids == (5, 6)

    run(check())


def test_messages_concatenate_to_the_answer_and_only_the_ends_have_extras(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            call = pb.GenerateRequest(text="5", params=pb.SamplingParams(max_tokens=50, n=3), request_id="mine")
            messages = [pb.GenerateResponse.FromString(data) async for data in rpc(call.SerializeToString())]
        first, rest = messages[0], messages[1:]
        assert (first.request_id, list(first.prompt_token_ids)) == ("mine", [BOS, 5])
        assert not any(message.request_id or message.prompt_token_ids for message in rest)
        for index in range(3):
            mine = [message for message in messages if message.index == index]
            assert [t for message in mine for t in message.token_ids] == list(range(6, 56))
            assert "".join(message.text for message in mine) == "".join(f" {i}" for i in range(6, 56))
            assert [message.finish_reason for message in mine] == [0] * (len(mine) - 1) + [pb.FINISH_REASON_LENGTH]
            assert [message.HasField("usage") for message in mine] == [False] * (len(mine) - 1) + [True]
            assert len(mine) > 5  # streamed, not collected

    run(check())


def test_end_token_and_stop_strings_and_stop_ids_say_why(serve, run):
    async def check():
        async with serve() as running:
            client = running.client
            (eos,) = await client.generate([EOS - 3])
            (string,) = await client.generate([5], SamplingParams(stop=(" 9",)))
            (token,) = await client.generate([5], SamplingParams(stop_token_ids=(8,)))
        assert (eos.token_ids, eos.text, eos.finish_reason, eos.stop_reason) == (
            (997, 998, 999),
            " 997 998",
            "stop",
            None,
        )
        assert (string.text, string.finish_reason, string.stop_reason) == (" 6 7 8", "stop", " 9")
        assert (token.text, token.token_ids, token.stop_reason) == (" 6 7", (6, 7, 8), 8)

    run(check())


def test_logprobs_come_with_their_tokens(serve, run):
    async def check():
        async with serve() as running:
            (answer,) = await running.client.generate([5], SamplingParams(max_tokens=2, logprobs=2))
            (chosen,) = await running.client.generate([5], SamplingParams(max_tokens=1, logprobs=0))
        assert answer.logprobs == (
            TokenLogprobs(6, -1.0, ((6, -1.0), (7, -2.0))),
            TokenLogprobs(7, -1.0, ((7, -1.0), (8, -2.0))),
        )
        assert chosen.logprobs == (TokenLogprobs(6, -1.0, ()),)

    run(check())


def test_every_parameter_reaches_the_engine(serve, run):
    params = SamplingParams(
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
        seed=2**64 - 1,
        stop=("a", "ä"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        include_stop=True,
        logprobs=3,
        allowed_token_ids=(3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        skip_special_tokens=False,
        n=2,
    )

    async def check():
        async with serve() as running:
            await running.client.generate([5], params)
            admissions = [a for plan in running.executor.plans for a in plan.admissions]
        assert [admission.params for admission in admissions] == [params, params]
        assert admissions[0].stop_token_ids == (1, 2)  # without the model's own: ignore_eos
        assert admissions[0].seed == 2**64 - 1

    run(check())


def test_defaults_are_those_of_sampling_params(serve, run):
    async def check():
        async with serve() as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            call = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[EOS - 1]))
            async for _ in rpc(call.SerializeToString()):
                pass
            (admission,) = (a for plan in running.executor.plans for a in plan.admissions)
        expected = SamplingParams(max_tokens=MAX_LENGTH - 1, seed=admission.seed)
        assert admission.params == expected
        assert admission.stop_token_ids == (EOS,)

    run(check())


def test_unseeded_requests_get_seeds_of_their_own(serve, run):
    async def check():
        async with serve() as running:
            for _ in range(3):
                await running.client.generate([5], SamplingParams(max_tokens=1))
            seeds = {a.seed for plan in running.executor.plans for a in plan.admissions}
        assert len(seeds) == 3

    run(check())


def test_lower_priority_numbers_run_first(serve, run):
    async def check():
        async with serve(slots=1, step_seconds=0.002) as running:
            blocker = asyncio.create_task(running.client.generate([1], SamplingParams(max_tokens=20)))
            while not running.server.orchestrator.status().slots_used:
                await asyncio.sleep(0.001)
            ended: list[str] = []

            async def one(name, priority):
                await running.client.generate([1], SamplingParams(max_tokens=2), priority=priority)
                ended.append(name)

            late = asyncio.create_task(one("late", 5))
            while running.server.orchestrator.status().waiting_requests < 1:
                await asyncio.sleep(0.001)
            await asyncio.gather(blocker, late, one("soon", -5))
        assert ended == ["soon", "late"]

    run(check())


def test_model_info_and_status_say_what_there_is(serve, run):
    async def check():
        async with serve() as running:
            info, status = await running.client.model_info(), await running.client.status()
        assert dataclasses.asdict(info) == {
            "name": "numbers",
            "vocab_size": VOCAB_SIZE,
            "max_length": MAX_LENGTH,
            "max_prompt_tokens": MAX_LENGTH - 1,
            "eos_token_ids": (EOS,),
            "bos_token_id": BOS,
            "chat_template": "{{ messages }}",
            "family": "llama",
            "parameters": 12345,
            "dtype": "float32",
            "devices": "fake x1",
        }
        assert (status.state, status.ready, status.slots_total, status.slots_used) == ("ready", True, SLOTS, 0)
        assert status.uptime_seconds > 0

    run(check())


def test_status_counts_running_and_waiting_requests(serve, run):
    async def check():
        async with serve(step_seconds=0.005) as running:
            params = SamplingParams(max_tokens=200)
            tasks = [asyncio.create_task(running.client.generate([1, 2], params)) for _ in range(SLOTS + 2)]
            status = await running.client.status()
            while (status.running_requests, status.waiting_requests) != (SLOTS, 2):
                await asyncio.sleep(0.005)
                status = await running.client.status()
            assert (status.slots_used, status.waiting_tokens) == (SLOTS, 4)
            assert 0 < status.pages_used <= status.pages_total
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await running.until_idle()
            status = await running.client.status()
            assert (status.running_requests, status.waiting_requests, status.pages_used) == (0, 0, 0)

    run(check())


def test_abort_ends_the_stream_with_cancelled_and_frees_the_slot(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            stream = running.client.stream([1], SamplingParams(max_tokens=200), request_id="mine")
            await anext(stream)
            assert await running.client.abort("mine")
            with pytest.raises(RequestAborted, match="mine was aborted"):
                _ = [delta async for delta in stream]
            await running.until_idle()
            assert not await running.client.abort("mine")
            assert not await running.client.abort("never seen")
            assert await running.metric("vllm:request_success_total", finished_reason="abort") == 1

    run(check())


def test_a_request_id_in_use_is_refused_until_it_is_free(serve, run):
    async def check():
        async with serve(step_seconds=0.002) as running:
            stream = running.client.stream([1], SamplingParams(max_tokens=50), request_id="mine")
            await anext(stream)
            with pytest.raises(InvalidRequest, match="'mine' is running"):
                await running.client.generate([1], request_id="mine")
            async for _ in stream:
                pass
            (answer,) = await running.client.generate([1], SamplingParams(max_tokens=1), request_id="mine")
            assert answer.request_id == "mine"

    run(check())


def test_256_streams_with_slow_readers_among_them_get_every_token_in_order(serve, run):
    async def check():
        async with serve(slots=256) as running:

            async def one(number):
                start = number % 100
                got: list[int] = []
                stream = running.client.stream([start], SamplingParams(max_tokens=100))
                async for delta in stream:
                    got += delta.token_ids
                    if number % 5 == 0:
                        await asyncio.sleep(0.05)
                    last = delta
                assert got == list(range(start + 1, start + 101))
                assert (last.finish_reason, last.usage) == ("length", Usage(1, 100))

            await asyncio.gather(*(one(number) for number in range(256)))
            await running.until_idle()
            assert await running.metric("vllm:generation_tokens_total") == 25600

    run(check())


def test_a_reader_that_reads_late_gets_all_in_few_messages(serve, run):
    async def check():
        async with serve() as running:
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            call = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), params=pb.SamplingParams(max_tokens=200))
            calls = [rpc(call.SerializeToString()) for _ in range(8)]
            await running.until_idle()
            while await running.metric("vllm:request_success_total", finished_reason="length") < 8:
                await asyncio.sleep(0.005)
            for answer in calls:
                messages = [pb.GenerateResponse.FromString(data) async for data in answer]
                assert [t for m in messages for t in m.token_ids] == list(range(2, 202))
                assert messages[-1].usage.completion_tokens == 200
                assert len(messages) < 200

    run(check())


def test_300_requests_at_once_on_a_short_queue_are_served_or_refused_and_none_is_lost(serve, run):
    async def check():
        async with serve(step_seconds=0.002, settings=["scheduler.max_waiting_requests=8"]) as running:
            refused: list[Overloaded] = []

            async def one():
                try:
                    (answer,) = await running.client.generate([1], SamplingParams(max_tokens=20))
                except Overloaded as error:
                    refused.append(error)
                    return 0
                return len(answer.token_ids)

            counts = await asyncio.gather(*(one() for _ in range(300)))
            assert set(counts) == {0, 20}
            assert counts.count(20) >= SLOTS + 8
            assert all(error.retry_after_seconds >= 1 for error in refused)
            assert all("scheduler.max_waiting_requests" in str(error) for error in refused)
            assert await running.metric("vllm:admission_rejections_total") == len(refused)
            await running.until_idle()

    run(check())


def test_a_full_queue_answers_resource_exhausted_within_100_ms(serve, run):
    async def check():
        settings = ["scheduler.max_waiting_requests=1"]
        async with serve(step_seconds=0.01, slots=1, max_length=1024, settings=settings) as running:
            streams = [running.client.stream([1], SamplingParams(max_tokens=1000)) for _ in range(2)]
            while (
                running.server.orchestrator.status().waiting_requests < 1
                or running.server.orchestrator.status().running < 1
            ):
                await asyncio.sleep(0.005)
            rpc = running.channel.unary_stream("/jetserve.v1.Inference/Generate")
            call = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
            seconds = []
            for _ in range(5):
                start = asyncio.get_running_loop().time()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rpc(call).read()
                seconds.append(asyncio.get_running_loop().time() - start)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert int(dict(caught.value.trailing_metadata())["retry-after-ms"]) >= 1000
            assert min(seconds) < 0.1
            for stream in streams:
                stream.close()

    run(check())


def test_reflection_lists_every_service_and_describes_the_messages(serve, run):
    async def check():
        async with serve() as running:

            def ask():
                with grpc.insecure_channel(running.address) as channel:
                    database = ProtoReflectionDescriptorDatabase(channel)
                    services = set(database.get_services())
                    file = database.FindFileContainingSymbol("jetserve.v1.GenerateRequest")
                    return services, {message.name for message in file.message_type}

            services, messages = await asyncio.to_thread(ask)
        assert services == {
            "jetserve.v1.Inference",
            "jetstream_proto.Orchestrator",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert {"GenerateRequest", "SamplingParams", "GenerateResponse"} <= messages

    run(check())


def test_many_connections_at_once(serve, run):
    async def check():
        async with serve(slots=32) as running:

            async def one():
                async with AsyncClient(running.address) as client:
                    return (await client.generate([1], SamplingParams(max_tokens=3)))[0].token_ids

            assert set(await asyncio.gather(*(one() for _ in range(20)))) == {(2, 3, 4)}

    run(check())
