"""Files that commands write. Imports no jax."""

from __future__ import annotations

import os
from pathlib import Path

from jetserve.errors import ConfigError


def require_writable(file: Path) -> None:
    """Finds before a long run what would be found after it.

    Raises: ConfigError when the file could not be written.
    """
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder")
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"cannot write {file}: no permission")
