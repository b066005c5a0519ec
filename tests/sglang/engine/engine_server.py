"""``sglang.Engine`` behind those routes of SGLang's HTTP API that ``tests.e2e`` uses.

``python -m tests.sglang.engine.engine_server`` takes the flags of ``sglang.launch_server``.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


def handler(engine: Any) -> type[BaseHTTPRequestHandler]:
    """Answers from an engine, one request at a time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            arguments = engine.server_args
            names = ("page_size", "hicache_storage_backend", "hicache_storage_backend_extra_config")
            self._answer(200, {name: getattr(arguments, name) for name in names})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            url = urlsplit(self.path)
            if url.path == "/generate":
                self._answer(200, engine.generate(**body))
                return
            timeout_s = float(parse_qs(url.query)["timeout"][0])
            flush = engine.tokenizer_manager.flush_cache(timeout_s=timeout_s)
            done = engine.loop.run_until_complete(flush)
            self._answer(200 if done.success else 400, done.message)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


async def take_signals(engine: Any) -> None:
    """Let SGLang take SIGTERM for its own event loop now, and not with its first request.

    That loop runs in requests only here, and SIGTERM would wait for one.
    """
    engine.tokenizer_manager.auto_create_handle_loop()


def main() -> None:
    import sglang
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(sys.argv[1:])
    engine = sglang.Engine(server_args=arguments)
    engine.loop.run_until_complete(take_signals(engine))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        HTTPServer((arguments.host, arguments.port), handler(engine)).serve_forever()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
