"""The real server over a device that costs the host nothing: `python -m tests.bench.fake_server SLOTS STEP_SECONDS`.

Prints the gRPC address once it is ready, then a line of JSON for each line it reads: what it has used so far. Ends when
its input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from jetserve import config
from jetserve.server import serving
from tests.bench.fake_engine import fake_model


def main(slots: int, step_seconds: float) -> int:
    settings = ["model.name=fake", "server.grpc_port=0", "server.http_port=0", "server.log_level=warning"]
    model = fake_model(slots, step_seconds)

    def answer() -> None:
        for _ in sys.stdin:
            usage = {"cpu_seconds": time.process_time(), **model.engine.status()._asdict()}
            sys.stdout.write(json.dumps(usage) + "\n")
            sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=answer, daemon=True).start()
    return serving.run(config.load(settings=settings), lambda _report: model, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
