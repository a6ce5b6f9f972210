"""KV events on the wire: bytes written out by hand, readers that come late, go away, do not read or send rubbish."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from jetserve.config import KvEventsSettings
from jetserve.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Medium
from jetserve.server import kv_events
from jetserve.server.kv_events import BatchEncoder, KvEventPublisher
from tests.server.kv_reader import END, FREE, Reader, name_in, number_of, stored

STARTED_SECONDS = 1_700_000_000.25
FIRST = 1_700_000_000_250_000  # the number of the first batch
_TOP = 2**64 - 1


@contextlib.contextmanager
def publishing(*, start: bool = True, **settings: Any) -> Iterator[KvEventPublisher]:
    settings = {"endpoint": FREE, "replay_endpoint": FREE} | settings
    publisher = KvEventPublisher(KvEventsSettings(**settings), clock=lambda: STARTED_SECONDS)
    if start:
        publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop()


@contextlib.contextmanager
def reading(publisher: KvEventPublisher, **arguments: Any) -> Iterator[Reader]:
    reader = Reader(publisher, **arguments)
    try:
        yield reader
    finally:
        reader.close()


# The MessagePack specification: 0x8n map, 0x9n array, 0xan text of n bytes, 0xc0 nil, 0xcb float64, 0xcc/0xcf u8/u64.
GOLDEN: list[KvEvent] = [
    BlockStored((_TOP, 2), 200, (1, 2, 3, 4), adapter="fr"),
    BlockStored((5,), None, (7, 8), Medium.HOST, cache_salt="s"),
    BlockRemoved((2, _TOP)),
    AllBlocksCleared(),
]
GOLDEN_HEAD = b"\x93" + b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00" + b"\x94"  # [1.5, four events, ..
GOLDEN_MAP = (
    GOLDEN_HEAD
    + b"\x88"
    + b"\xa4type\xabBlockStored"
    + b"\xacblock_hashes\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x02"
    + b"\xb1parent_block_hash\xcc\xc8"
    + b"\xa9token_ids\x94\x01\x02\x03\x04"
    + b"\xaablock_size\x02"
    + b"\xa7lora_id\xc0"
    + b"\xa6medium\xa3GPU"
    + b"\xa9lora_name\xa2fr"
    + b"\x89"
    + b"\xa4type\xabBlockStored"
    + b"\xacblock_hashes\x91\x05"
    + b"\xb1parent_block_hash\xc0"
    + b"\xa9token_ids\x92\x07\x08"
    + b"\xaablock_size\x02"
    + b"\xa7lora_id\xc0"
    + b"\xa6medium\xa3CPU"
    + b"\xa9lora_name\xc0"
    + b"\xaaextra_keys\x91\x91\xa1s"
    + b"\x83"
    + b"\xa4type\xacBlockRemoved"
    + b"\xacblock_hashes\x92\x02\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
    + b"\xa6medium\xa3GPU"
    + b"\x81\xa4type\xb0AllBlocksCleared"
    + b"\x00"  # data_parallel_rank
)
GOLDEN_ARRAY = (
    GOLDEN_HEAD
    + b"\x99\xabBlockStored\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x02\xcc\xc8"
    + b"\x94\x01\x02\x03\x04\x02\xc0\xa3GPU\xa2fr\xc0"
    + b"\x99\xabBlockStored\x91\x05\xc0\x92\x07\x08\x02\xc0\xa3CPU\xc0\x91\x91\xa1s"
    + b"\x93\xacBlockRemoved\x92\x02\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa3GPU"
    + b"\x91\xb0AllBlocksCleared"
    + b"\x00"
)


@pytest.mark.parametrize(("encoding", "payload"), [("map", GOLDEN_MAP), ("array", GOLDEN_ARRAY)])
def test_payloads_are_these_bytes(encoding: str, payload: bytes) -> None:
    assert BatchEncoder(encoding).encode(GOLDEN, 1.5) == payload


_hash = st.integers(1, _TOP)
_text = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    blocks, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return BlockStored(
        tuple(draw(st.lists(_hash, min_size=blocks, max_size=blocks))),
        draw(st.none() | _hash),
        tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=blocks * size, max_size=blocks * size))),
        draw(st.sampled_from(Medium)),
        draw(_text),
        draw(_text),
    )


events = st.lists(
    stored_events()
    | st.builds(BlockRemoved, st.lists(_hash, min_size=1).map(tuple), st.sampled_from(Medium))
    | st.just(AllBlocksCleared())
)


def as_map(event: KvEvent) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(event.hashes), "medium": str(event.medium)}
    fields = {
        "type": "BlockStored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": len(event.token_ids) / len(event.hashes),
        "lora_id": None,
        "medium": str(event.medium),
        "lora_name": event.adapter,
    }
    if event.parent is None and event.cache_salt is not None:
        fields["extra_keys"] = [[event.cache_salt]] + [None] * (len(event.hashes) - 1)
    return fields


@given(events, st.floats(0, 2e9))
def test_map_batches_hold_the_fields_of_vllm(batch: list[KvEvent], seconds: float) -> None:
    payload = BatchEncoder("map").encode(batch, seconds)

    assert msgspec.msgpack.decode(payload) == [seconds, [as_map(event) for event in batch], 0]


@given(events, st.floats(0, 2e9))
def test_array_batches_hold_the_same_in_order(batch: list[KvEvent], seconds: float) -> None:
    wanted = [as_map(event) for event in batch]
    for fields in wanted:
        if fields["type"] == "BlockStored":
            fields.setdefault("extra_keys", None)

    payload = BatchEncoder("array").encode(batch, seconds)

    assert msgspec.msgpack.decode(payload) == [seconds, [list(fields.values()) for fields in wanted], 0]


def test_a_salt_that_is_no_unicode_does_not_stop_the_others() -> None:
    payload = BatchEncoder("map").encode([BlockStored((1,), None, (1,), cache_salt="a\ud800")], 0.0)

    assert msgspec.msgpack.decode(payload)[1][0]["extra_keys"] == [["a\\ud800"]]


def test_a_batch_is_topic_number_and_payload() -> None:
    with publishing(topic="kv@10.0.0.1@demo") as publisher, reading(publisher, topic=b"kv@") as reader:
        last = reader.join(publisher)
        publisher.publish([BlockRemoved((3,)), AllBlocksCleared()])
        topic, number, payload = reader.read()

    assert (topic, number_of(number)) == (b"kv@10.0.0.1@demo", last + 1)
    assert msgspec.msgpack.decode(payload) == [
        STARTED_SECONDS,
        [{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, {"type": "AllBlocksCleared"}],
        0,
    ]


def test_a_late_reader_catches_up_without_a_gap() -> None:
    with publishing() as publisher:
        for name in range(1, 51):
            publisher.publish([stored(name)])
        with reading(publisher) as reader:
            last = reader.join(publisher, 51)
            answers = reader.replay(0)

    assert [number_of(number) for _, number, _ in answers] == list(range(FIRST, last + 1))
    assert [name_in(payload) for _, _, payload in answers[:51]] == list(range(1, 52))


def test_what_is_repeated_is_what_was_sent() -> None:
    with publishing(topic="t") as publisher, reading(publisher) as reader:
        last = reader.join(publisher)
        for name in range(3):
            publisher.publish([stored(name + 1)])
        sent = [reader.read() for _ in range(3)]

        assert reader.replay(last + 1) == sent
        assert reader.replay(last + 3) == sent[2:]
        assert reader.replay(last + 4) == []
        assert reader.replay(_TOP) == []


def test_replay_of_lost_history_begins_at_the_oldest_kept() -> None:
    with publishing(buffer_steps=10) as publisher, reading(publisher) as reader:
        for name in range(1, 100):
            publisher.publish([stored(name)])
        last = reader.join(publisher)

        for first in (0, FIRST, last - 10, last - 9):
            assert [number_of(number) for _, number, _ in reader.replay(first)] == list(range(last - 9, last + 1))


def test_a_plain_request_socket_gets_the_first_batch() -> None:
    with publishing() as publisher, reading(publisher, kind=zmq.REQ) as reader:
        last = reader.join(publisher)
        for first, wanted in ((last, [b"", last.to_bytes(8, "big")]), (last + 1, END[1:3])):
            reader.asker.send(first.to_bytes(8, "big"))
            assert reader.answer()[:2] == wanted


RUBBISH: list[list[bytes]] = [
    [b""],
    [b"x"],
    [bytes(8)],
    [b"", b""],
    [b"", bytes(7)],
    [b"", bytes(9)],
    [b"x", bytes(8)],
    [b"", bytes(8), b""],
    [b"", b"", bytes(8)],
    [b"\xff" * 4000],
    [b""] * 500,
]


def test_rubbish_is_not_answered_and_does_no_harm() -> None:
    with publishing() as publisher, reading(publisher) as reader:
        last = reader.join(publisher)
        for frames in RUBBISH:
            reader.asker.send_multipart(frames)

        assert len(reader.replay(last)) == 1  # and nothing before it
        with reading(publisher) as huge:
            huge.asker.send_multipart([b"", bytes(1 << 20)])
            assert not huge.asker.poll(50)
        publisher.publish([stored(2)])
        assert number_of(reader.read()[1]) == last + 1


def test_a_burst_arrives_whole_and_in_order() -> None:
    count = 9_999
    with publishing() as publisher, reading(publisher) as reader:
        last = reader.join(publisher)
        for name in range(1, count + 1):
            publisher.publish([stored(name)])
        batches = [reader.read() for _ in range(count)]
        again = reader.replay(last + 1)
        twice = reader.replay(last + 1)

    assert [number_of(number) for _, number, _ in batches] == list(range(last + 1, last + 1 + count))
    assert [name_in(payload) for _, _, payload in batches] == list(range(1, count + 1))
    assert again == twice == batches


def test_a_reader_that_comes_back_asks_for_what_it_missed() -> None:
    with publishing() as publisher:
        with reading(publisher) as reader:
            last = reader.join(publisher)
        for name in range(1, 6):
            publisher.publish([stored(name)])
        with reading(publisher) as reader:
            now = reader.join(publisher, 6)
            missed = reader.replay(last + 1)

    assert [number_of(number) for _, number, _ in missed] == list(range(last + 1, now + 1))
    assert [name_in(payload) for _, _, payload in missed[:5]] == [1, 2, 3, 4, 5]


def test_a_process_started_later_goes_on_with_higher_numbers() -> None:
    with publishing() as publisher, reading(publisher) as reader:
        last = reader.join(publisher)
        address = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        publisher.stop()
        second = KvEventPublisher(KvEventsSettings(**address), clock=lambda: STARTED_SECONDS + 5)
        second.start()
        second.publish([AllBlocksCleared()])
        now = reader.join(second)
        answers = reader.replay(last + 1)
        second.stop()

    assert last < FIRST + 5_000_000 <= now
    assert msgspec.msgpack.decode(answers[0][2])[1] == [{"type": "AllBlocksCleared"}]


def connected_without_reading(publisher: KvEventPublisher) -> socket.socket:
    """Speaks ZMTP 3.0 as far as a subscription to everything, and then reads no more."""
    host, port = publisher.endpoint.removeprefix("tcp://").split(":")
    peer = socket.create_connection((host, int(port)))
    peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready + b"\x00\x01\x01")
    peer.recv(1)  # it answers
    return peer


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    big = BlockStored((1,), None, tuple(range(20_000)))
    with (
        publishing(high_water_mark=2, buffer_steps=300) as publisher,
        connected_without_reading(publisher),
        reading(publisher) as reader,
    ):
        last = reader.join(publisher)
        for _ in range(300):  # 18 MB, more than the system's buffers take
            publisher.publish([big])
        publisher.publish([stored(2)])

        answers = reader.replay(last + 1)
        assert number_of(answers[-1][1]) == last + 301
        assert name_in(answers[-1][2]) == 2
        publisher.stop()  # comes back, although the last batches cannot be sent


def test_what_cannot_be_queued_is_told_as_a_loss_of_all() -> None:
    most = kv_events.MAX_QUEUED_BATCHES
    with publishing(start=False) as publisher:
        for name in range(1, most + 3):
            publisher.publish([stored(name)])
        publisher.start()
        with reading(publisher) as reader:
            reader.join(publisher, most + 3)
            answers = reader.replay(0)

    assert msgspec.msgpack.decode(answers[0][2])[1] == [{"type": "AllBlocksCleared"}]
    assert [name_in(payload) for _, _, payload in answers[1:4]] == [most + 1, most + 2, most + 3]


def test_what_was_published_before_the_stop_is_sent() -> None:
    with publishing() as publisher, reading(publisher) as reader:
        last = reader.join(publisher)
        for name in range(1, 101):
            publisher.publish([stored(name)])
        publisher.stop()
        assert [number_of(reader.read()[1]) for _ in range(100)] == list(range(last + 1, last + 101))
        publisher.publish([stored(1)])  # nobody is there any more
        assert not reader.subscriber.poll(20)


def test_the_port_that_was_taken_is_known() -> None:
    with publishing(endpoint="tcp://127.0.0.1:*", replay_endpoint=None) as publisher:
        assert int(publisher.endpoint.removeprefix("tcp://127.0.0.1:")) > 0
        assert publisher.replay_endpoint is None
