"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A slow machine is no failure. The rest is hypothesis' own: fixed examples where CI is set, fresh ones elsewhere.
settings.register_profile("jetserve", parent=settings.default, deadline=None)
settings.load_profile("jetserve")
