"""What the small files beside a vocabulary say: the framing tokens, added tokens and the chat template.

Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.jinja, each if it is there, as
transformers writes them. Values of an unexpected type are an error, unknown keys are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jetserve.errors import TokenizerError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class AddedToken(NamedTuple):
    """A token that is recognised in the text itself, before the model of the vocabulary sees it.

    Attributes:
      strips_left, strips_right: white space beside it belongs to it (Hugging Face's lstrip and rstrip).
    """

    text: str
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True)
class Settings:
    """What is None was not said.

    Attributes:
      added: by id.
      special_texts: names that any of the files declares special.
    """

    bos: str | None = None
    eos: str | None = None
    adds_bos: bool | None = None
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    special_texts: frozenset[str] = frozenset()
    chat_template: str | None = None


def read_settings(folder: Path) -> Settings:
    """Reads the files of `folder`; without any, nothing is said.

    Raises: TokenizerError naming the file and what is wrong with it.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_object(config_file) if config_file.is_file() else {}
    map_file = folder / "special_tokens_map.json"
    special_map = read_object(map_file) if map_file.is_file() else {}
    added_file = folder / "added_tokens.json"
    added_ids = read_object(added_file) if added_file.is_file() else {}

    names = {key: _token_text(special_map.get(key)) for key in ("bos_token", "eos_token")}
    for key in names:
        if key in config:  # also when it says null: this vocabulary has none
            names[key] = _token_text(config[key])
    special = {text for values in (config, special_map) for text in _special_texts(values)}
    added = _added_tokens(config_file, config.get("added_tokens_decoder"))
    for text, token_id in added_ids.items():
        if not isinstance(token_id, int):
            raise TokenizerError(f"{added_file}: the id of {text!r} is {token_id!r}, must be a whole number")
        added.setdefault(token_id, AddedToken(text, text in special))
    adds_bos = config.get("add_bos_token")
    return Settings(
        bos=names["bos_token"],
        eos=names["eos_token"],
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        added=added,
        special_texts=frozenset(special | {token.text for token in added.values() if token.is_special}),
        chat_template=_chat_template(folder, config),
    )


def read_object(file: Path) -> dict[str, Json]:
    """Reads a JSON file that holds an object. Raises: TokenizerError."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON ({error}); get it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a {type(value).__name__}, must hold a JSON object")
    return value


def _token_text(value: Json) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_texts(values: Mapping[str, Json]) -> set[str]:
    found: set[str] = set()
    for key, value in values.items():
        if key.endswith("_token"):
            items = [value]
        elif key in ("additional_special_tokens", "extra_special_tokens"):
            items = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        else:
            continue
        found.update(text for item in items if (text := _token_text(item)))
    return found


def _added_tokens(file: Path, values: Json) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    if values is None:
        return added
    if not isinstance(values, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is {values!r:.60}, must be an object of tokens by id")
    for key, value in values.items():
        text = _token_text(value)
        if not key.isdecimal() or text is None or not isinstance(value, dict):
            raise TokenizerError(
                f"{file}: added_tokens_decoder has {key!r}: {value!r:.60}, must be id: {{content, ...}}"
            )
        added[int(key)] = AddedToken(
            text, bool(value.get("special")), bool(value.get("lstrip")), bool(value.get("rstrip"))
        )
    return added


def _chat_template(folder: Path, config: Mapping[str, Json]) -> str | None:
    """The file wins over the setting; of several named templates the default one is taken."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {file}: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
