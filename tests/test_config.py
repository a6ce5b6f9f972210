"""The configuration tree: where a value comes from, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jetserve import config
from jetserve.config import Config
from jetserve.errors import ConfigError
from tests.links import ROOT

SECTIONS = ("model", "mesh", "engine", "scheduler", "kv_events", "server")


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_is_the_defaults() -> None:
    tree = config.load()

    assert tree == Config()
    assert (tree.model.name, tree.engine.slots, tree.server.grpc_port) == ("demo", 32, 9000)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "engine: {slots: 2, page_size: 8, prefill_rows: 3, max_length: 64}")

    tree = config.load(file, ["engine.page_size=16", "engine.prefill_rows=4"], {"engine.prefill_rows": 5})

    assert (tree.engine.slots, tree.engine.page_size, tree.engine.prefill_rows) == (2, 16, 5)
    assert tree.engine.max_length == 64


def test_the_last_of_equal_settings_wins() -> None:
    assert config.load(settings=["engine.slots=4", "engine.slots=8"]).engine.slots == 8


def test_flags_that_were_not_given_change_nothing() -> None:
    tree = config.load(settings=["server.grpc_port=1"], overrides={"server.grpc_port": None})

    assert tree.server.grpc_port == 1


@pytest.mark.parametrize(
    ("setting", "section", "field", "value"),
    [
        ("engine.slots=8", "engine", "slots", 8),
        (" engine.slots = 8 ", "engine", "slots", 8),
        ("engine.prefill_sizes=[16, 64]", "engine", "prefill_sizes", (16, 64)),
        ("engine.max_length=null", "engine", "max_length", None),
        ("engine.strict_compile=true", "engine", "strict_compile", True),
        ("model.name=a=b.gguf", "model", "name", "a=b.gguf"),
        ("model.dtype=float32", "model", "dtype", "float32"),
        ("server.drain_timeout_seconds=0.5", "server", "drain_timeout_seconds", 0.5),
        ("server.host='::1'", "server", "host", "::1"),
    ],
)
def test_settings_are_yaml(setting: str, section: str, field: str, value: object) -> None:
    assert getattr(getattr(config.load(settings=[setting]), section), field) == value


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.slots", "setting 'engine.slots' is not of the form path=value, as in engine.slots=8"),
        ("=8", "setting '=8' is not of the form path=value"),
        ("engine.slots=[", "setting 'engine.slots=[': '[' is not a YAML value"),
        ("engine.slots=2026-13-45", "setting 'engine.slots=2026-13-45': '2026-13-45' is not a YAML value"),
        ("engine.slot=8", "unknown setting engine.slot; did you mean engine.slots?"),
        ("engin.slots=8", "unknown setting engin; did you mean engine?"),
        ("slots=8", "unknown setting slots"),
        ("zzzz=8", "unknown setting zzzz; sections are model, mesh, engine, scheduler, kv_events, server"),
        ("engine.slots.more=8", "engine.slots"),
        ("engine=8", "engine=8: must be a section of settings"),
        ("engine.slots=true", "engine.slots=True: Input should be a valid integer"),
        ("engine.slots='8'", "engine.slots='8': Input should be a valid integer"),
        ("server.drain_timeout_seconds=true", "server.drain_timeout_seconds=True: Input should be a valid number"),
        ("engine.prefill_sizes=32", "engine.prefill_sizes=32: must be a list"),
        ("engine.slots=0", "engine.slots=0: Input should be greater than or equal to 1"),
        ("engine.slots=4097", "engine.slots=4097: Input should be less than or equal to 4096"),
        ("engine.slots=many", "engine.slots='many': Input should be a valid integer"),
        ("engine.slots=1.5", "engine.slots=1.5: Input should be a valid integer"),
        ("engine.slots=null", "engine.slots: Input should be a valid integer"),
        ("engine.prefill_sizes=[]", "engine.prefill_sizes"),
        ("engine.prefill_sizes=[16, 0]", "engine.prefill_sizes.1=0: Input should be greater than or equal to 1"),
        ("engine.generate_rows=[]", "engine.generate_rows"),
        ("engine.generate_steps=[]", "engine.generate_steps"),
        ("engine.attention=fast", "engine.attention='fast': Input should be 'auto' or 'xla'"),
        ("model.dtype=float16", "model.dtype='float16': Input should be 'auto', 'float32' or 'bfloat16'"),
        ("model.name=", "model.name: Input should be a valid string"),
        ("model.name=''", "model.name='': String should have at least 1 character"),
        ("mesh.tensor=0", "mesh.tensor=0"),
        ("engine.host_kv_bytes=-1", "engine.host_kv_bytes=-1: Input should be greater than or equal to 0"),
        ("engine.host_kv_bytes=17592186044417", "Input should be less than or equal to 17592186044416"),
        ("engine.prefix_cache=1.5", "engine.prefix_cache=1.5: Input should be a valid boolean"),
        ("scheduler.max_waiting_requests=0", "scheduler.max_waiting_requests=0"),
        ("scheduler.policy=lifo", "scheduler.policy='lifo': Input should be 'fcfs' or 'longest_prefix'"),
        ("scheduler.ageing=0", "scheduler.ageing=0: Input should be greater than or equal to 1"),
        ("scheduler.ttft_target_ms=0", "scheduler.ttft_target_ms=0: Input should be greater than 0"),
        ("scheduler.tpot_target_ms=soon", "scheduler.tpot_target_ms='soon': Input should be a valid number"),
        ("kv_events.encoding=json", "kv_events.encoding='json': Input should be 'map' or 'array'"),
        ("kv_events.endpoint=''", "kv_events.endpoint='': String should have at least 1 character"),
        ("kv_events.endpoint=localhost:5557", "kv_events.endpoint='localhost:5557': must be tcp://address:port"),
        ("kv_events.endpoint=tcp://*", "kv_events.endpoint='tcp://*': must be tcp://address:port"),
        ("kv_events.endpoint=tcp://*:65536", "kv_events.endpoint='tcp://*:65536': must be tcp://address:port"),
        ("kv_events.endpoint=tcp://[::1]5557", "kv_events.endpoint='tcp://[::1]5557': must be tcp://address:port"),
        ("kv_events.endpoint=udp://*:5557", "kv_events.endpoint='udp://*:5557': must be tcp://address:port"),
        ("kv_events.buffer_steps=2147483648", "Input should be less than or equal to 2147483647"),
        ("kv_events.high_water_mark=2147483648", "Input should be less than or equal to 2147483647"),
        ("kv_events.replay_endpoint=5558", "kv_events.replay_endpoint=5558: Input should be a valid string"),
        ("kv_events.replay_endpoint=tcp://*:5558", "kv_events: replay_endpoint repeats what endpoint publishes"),
        ("scheduler.default_timeout_seconds=0", "scheduler.default_timeout_seconds=0: Input should be greater than 0"),
        ("server.grpc_port=65536", "server.grpc_port=65536: Input should be less than or equal to 65535"),
        ("server.http_port=-1", "server.http_port=-1"),
        ("server.max_message_bytes=1", "server.max_message_bytes=1: Input should be greater than or equal to 4096"),
        ("server.tls_key=key.pem", "tls_certificate and tls_key go together; set both or neither"),
        ("server.log_level=loud", "server.log_level='loud'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_right(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(settings=[setting])

    assert said in str(caught.value)


@pytest.mark.parametrize(
    "address", ["tcp://*:5557", "tcp://10.0.0.1:*", "tcp://[::1]:65535", "tcp://eth0:1", "ipc:///a"]
)
def test_addresses_of_kv_events_are_those_of_zmq(address: str) -> None:
    assert config.load(settings=[f"kv_events.endpoint={address}"]).kv_events.endpoint == address


def test_kv_events_are_published_and_repeated_on_ports_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"both tcp://\*:5557; give each a port of its own"):
        config.load(settings=["kv_events.endpoint=tcp://*:5557", "kv_events.replay_endpoint=tcp://*:5557"])
    assert config.load(settings=["kv_events.endpoint=tcp://*:*", "kv_events.replay_endpoint=tcp://*:*"])


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(settings=["engine.slots=0", "server.grpc_port=-1", "model.nam=x"])

    assert all(name in str(caught.value) for name in ("engine.slots=0", "server.grpc_port=-1", "model.name?"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "must hold a mapping, holds list"),
        ("engine", "must hold a mapping, holds str"),
        ("engine: [", "is not valid YAML"),
        ("engine: {slot: 1}", "unknown setting engine.slot; did you mean engine.slots?"),
        ("engines: {slots: 1}", "unknown setting engines; did you mean engine?"),
        ("engine: 7", "engine=7"),
        ("engine: {slots: 2}\nengine: {page_size: 8}", "line 2, column 1: 'engine' is there twice"),
        ("engine: {slots: 2, slots: 4}", "line 1, column 20: 'slots' is there twice"),
        ("engine:\n  slots: [1\n", "line 3, column 1: while parsing a flow sequence, expected ',' or ']'"),
        ("[1]: 2", "is not valid YAML: line 1, column 1: while constructing a mapping, found unhashable key"),
        ("model: {name: 2026-13-45}", "is not valid YAML: month must be in 1..12"),
        ("!!map [1]", "is not valid YAML: line 1, column 1: expected a mapping node"),
        ("engine: \x07", "is not valid YAML: unacceptable character"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text))

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_in_a_list_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(settings=["engine.prefill_sizes=[0]"])

    assert str(caught.value) == "engine.prefill_sizes.0=0: Input should be greater than or equal to 1"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml: No such file"):
        config.load(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match="is not valid YAML"):
        config.load(file)


@pytest.mark.parametrize("text", ["", "# all settings are commented out\n", "engine:\n  # slots: 8\nserver:\n"])
def test_empty_files_and_sections_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert config.load(write(tmp_path, text)) == Config()
    assert config.load(write(tmp_path, text), ["engine.slots=4"]).engine.slots == 4


def test_the_tree_is_frozen() -> None:
    tree = config.load()

    with pytest.raises(pydantic.ValidationError, match="frozen"):
        tree.engine.slots = 8  # type: ignore[misc]


@pytest.mark.parametrize("file", sorted((ROOT / "tpu_configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_configuration_loads(file: Path) -> None:
    assert config.load(file) != Config()


@pytest.mark.parametrize("name", SECTIONS)
def test_every_setting_says_why_it_is_there(name: str) -> None:
    assert tuple(Config.model_fields) == SECTIONS
    fields = type(getattr(Config(), name)).model_fields
    assert [field for field, info in fields.items() if not info.description] == []


@given(
    st.dictionaries(
        st.sampled_from(SECTIONS) | st.text(max_size=6),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    )
)
def test_any_yaml_is_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    file = write(tmp_path_factory.mktemp("any"), yaml.safe_dump(tree))
    try:
        assert isinstance(config.load(file, ["engine.slots=2"]), Config)
    except ConfigError:
        return
