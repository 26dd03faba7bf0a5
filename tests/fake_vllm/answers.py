"""The HTTP side of the fake vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from behaviour import DO
from sequences import Engine
from texts import OOM


def dead(code: int = 1) -> None:
    print(
        f"(APIServer pid={os.getpid()}) ERROR 11-30 02:47:11 [async_llm.py:906] vllm.v1.engine.exceptions."
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
        flush=True,
    )
    os._exit(code)


def handler(
    engine: Engine, model: str, version: str, say: Callable[..., None]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body leave in two packets; Nagle's rule would hold the second for 40 ms.
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, text: str) -> None:
            self.answer(status, json.dumps({"error": {"message": text, "code": status}}))

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(503 if "unhealthy" in DO else 200, "")
                if "health-then-die" in DO:
                    self.wfile.flush()
                    dead()
            elif self.path == "/metrics" and "no-metrics" not in DO:
                page = "<html>not metrics</html>\n" if "bad-metrics" in DO else engine.metrics()
                self.answer(200, page, "text/plain")
            elif self.path == "/v1/models" and self.allowed():
                entry = {"id": model, "max_model_len": engine.o["max_model_len"]}
                self.answer(200, json.dumps({"data": [entry]}))
            elif self.path == "/version":
                self.answer(200, json.dumps({"version": version}))
            elif not self.path.startswith("/v1/"):
                self.answer(404, '{"detail":"Not Found"}')

        def allowed(self) -> bool:
            key = os.environ.get("VLLM_API_KEY")
            if key is None or self.headers["authorization"] == f"Bearer {key}":
                return True
            self.answer(401, '{"error":"Unauthorized"}')
            return False

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with engine.lock:
                engine.requests += 1
                mine = engine.requests
            if mine == int(DO.get("die-after-requests", 0)):
                say(OOM, "core.py:1540", level="ERROR")
                dead()
            if mine == int(DO.get("kill-after-requests", 0)):
                os.kill(os.getpid(), signal.SIGKILL)
            if "flood-load" in DO:
                print(f"WARNING 11-30 02:33:11 [x.py:1] {'x' * 1000}\n" * 300, end="", flush=True)
            prompt, output = len(body["prompt"]), body["max_tokens"]
            if not self.allowed():
                return
            if body["model"] != model:
                self.refuse(404, f"The model `{body['model']}` does not exist.")
            elif "http-500" in DO or every("http-500-every", mine):
                self.refuse(500, "Internal server error")
            elif "drop" in DO or every("drop-every", mine):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif prompt + output > engine.o["max_model_len"]:
                self.refuse(
                    400, f"This model's maximum context length is {engine.o['max_model_len']} tokens."
                )
            elif prompt + output > int(DO.get("refuse-long", 1 << 60)):
                self.refuse(400, "The decoder prompt is too long for this deployment.")
            elif "garbage" in DO:
                self.answer(200, "}{ not json")
            else:
                engine.serve(prompt, output)
                counted = output - ("short-count" in DO) + ("long-count" in DO)
                usage = {
                    "prompt_tokens": prompt + ("prompt-count" in DO),
                    "completion_tokens": counted,
                    "total_tokens": prompt + counted,
                }
                found = {"choices": [{"text": "", "finish_reason": "length"}]}
                self.answer(200, json.dumps(found if "no-usage" in DO else {**found, "usage": usage}))

    return Handler


def every(name: str, number: int) -> bool:
    """True for every Nth request, as the behaviour says."""
    return name in DO and number % int(DO[name]) == 0


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    # vLLM shares its port as well (create_server_socket sets SO_REUSEPORT).
    allow_reuse_port = True

    def handle_error(self, *_: object) -> None:
        """A client that left is no trouble."""

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Not HTTPServer's: it looks up the host's name.
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.server_address[:2]


def pass_time(say: Callable[..., None]) -> None:
    """The start's own time, and its talk."""
    flooded = 0
    while flooded < int(float(DO.get("flood", 0)) * (1 << 20)):
        line = f"(Worker pid=7) INFO 11-30 02:33:11 [x.py:1] step {flooded} {'y' * 900}\n"
        flooded += len(line) * 100
        sys.stdout.write(line * 100)
    for name in ("slow", "silent", "busy"):
        end = time.monotonic() + float(DO.get(name, 0))
        while time.monotonic() < end:
            if name == "slow":
                say("Loading safetensors checkpoint shards", "weight_utils.py:1")
            if name != "busy":
                time.sleep(0.1 if name == "slow" else max(0.0, end - time.monotonic()))
