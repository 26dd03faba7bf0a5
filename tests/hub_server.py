"""A stand-in for the model hub on 127.0.0.1: the few answers that metadata needs, and a record of them."""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 39 + "1"


def safetensors(tensors: dict[str, tuple[str, list[int], int]], data_bytes: int) -> bytes:
    """A weight file whose data are `data_bytes` zeros."""
    header, offset = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


@dataclass
class Hub:
    """`models` maps an id to its files; `gated` ids answer 403. `sent` counts the bytes of each path."""

    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            api = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/[\w.-]+)?", path)
            file = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[\w.-]+/(.+)", path)
            name = (api or file)[1] if api or file else ""
            if name in hub.gated:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
            elif name not in hub.models:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif api:
                siblings = [{"rfilename": one} for one in hub.models[name]]
                found = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body)
            else:
                assert file
                content = hub.models[name].get(file[2])
                if content is None:
                    self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                    return
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(content)}"', "Accept-Ranges": "bytes"}
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if wanted:
                    begin, end = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
                    headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
                    self._send(206, content[begin : end + 1], headers, body)
                else:
                    self._send(200, content, headers, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                path = self.path.split("?")[0]
                hub.sent[path] = hub.sent.get(path, 0) + len(content)
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
