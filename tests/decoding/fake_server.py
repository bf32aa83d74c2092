"""An OpenAI-compatible server that fails on demand, in this process or (`python fake_server.py PORT`) in its own.

What it answers depends on the messages alone, so that any two runs on it end with the same records.
"""

import contextlib
import hashlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TARGET = Path(__file__).parents[1] / "golden/qwen3/target"  # whose tokenizer and template tests ask with


def echo(body: dict) -> dict:
    """A message that tells which history it answers, its finish reason, and how many tokens it has."""
    seen = json.dumps([body["messages"], body["max_tokens"]], sort_keys=True)
    digest = hashlib.sha256(seen.encode()).hexdigest()[:12]
    finish_reason = "length" if digest < "4" else "stop"
    return {"message": {"role": "assistant", "content": f"{digest} to {body['messages'][-1]['content']}"},
            "finish_reason": finish_reason, "tokens": 7}  # fmt: skip


RECORDS = [
    {"id": f"r{i}", "conversations": [{"role": "user", "content": f"question {i}.{turn}"} for turn in range(1 + i % 3)]}
    for i in range(12)
]
SINGLE = [{"id": f"r{i}", "conversations": [{"role": "user", "content": f"question {i}.0"}]} for i in range(60)]


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(records: list[dict] = RECORDS) -> list[dict]:
    """What an undisturbed server makes of `records`, of 16 tokens at most each turn."""
    out = []
    for record in records:
        messages, reasons = [], []
        for turn in record["conversations"]:
            messages = [*messages, turn]
            made = echo({"messages": messages, "max_tokens": 16})
            messages = [*messages, made["message"]]
            reasons.append(made["finish_reason"])
        out.append(record | {"conversations": messages, "finish_reasons": reasons})
    return out


class FakeServer:
    """Serves from `start` to `stop`, which ends its connections as a kill would; it can start again on its port.

    Attributes:
      answer: body -> `{"message", "finish_reason", "tokens"}` and perhaps `prompt_tokens`.
      fault: (number of the request from 0, body) -> what goes wrong (a method `_fault_...`, or a status), or None.
      bodies: of all chat requests, in order.
      most: requests it had at one time.
    """

    def __init__(self, model: str = "golden", context: int | None = 512, port: int = 0):
        self.model, self.context = model, context
        self.answer: Callable[[dict], dict] = echo
        self.fault: Callable[[int, dict], str | int | None] = lambda number, body: None
        self.delay = 0.0  # of an answer, in seconds
        self.probe_delay = 0.0  # of telling its model
        self.gone = False  # without a word, also when asked for its model
        self.bodies: list[dict] = []
        self.most = self._now = 0
        self.probes = 0
        self.lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        fake = self

        class Handler(self.handler):
            server_fake = fake

        self._released = threading.Event()
        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            reset(connection)

    @contextlib.contextmanager
    def counted(self):
        with self.lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            yield
        finally:
            with self.lock:
                self._now -= 1


def reset(connection: socket.socket) -> None:
    """Close without a word: what is not read yet is lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        pass  # connections are broken on purpose


class FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which makes an answer 40 ms late
    server_fake: FakeServer

    def setup(self):
        super().setup()
        self.server_fake._connections.add(self.connection)

    def finish(self):
        self.server_fake._connections.discard(self.connection)
        super().finish()

    def log_message(self, *_):
        pass

    def do_GET(self):
        fake = self.server_fake
        fake.probes += 1
        if fake.gone:
            return self._fault_hang(None)
        time.sleep(fake.probe_delay)
        card = {"id": fake.model} | ({} if fake.context is None else {"max_model_len": fake.context})
        self._send(200, json.dumps({"data": [card]}).encode())

    def do_POST(self):
        fake = self.server_fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.counted():
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append(body)
            fault = fake.fault(number, body)
            if isinstance(fault, int):
                self._send(fault, json.dumps({"message": f"fault {fault}"}).encode())
            elif fault is not None:
                getattr(self, f"_fault_{fault}")(body)
            else:
                self._answer(body)

    def _answer(self, body: dict) -> None:
        time.sleep(self.server_fake.delay)
        self._send(200, json.dumps(self._completion(body)).encode())

    def _completion(self, body: dict) -> dict:
        made = self.server_fake.answer(body)
        usage = {"completion_tokens": made["tokens"]}
        if "prompt_tokens" in made:
            usage["prompt_tokens"] = made["prompt_tokens"]
        choice = {"index": 0, "message": made["message"], "finish_reason": made["finish_reason"]}
        return {"model": self.server_fake.model, "choices": [choice], "usage": usage}

    def _send(self, status: int, content: bytes, claimed: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if claimed is None else claimed))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    # ---- what can go wrong

    def _fault_reset(self, body):
        reset(self.connection)
        self.close_connection = True

    def _fault_hang(self, body):
        self.server_fake._released.wait()
        self._fault_reset(body)

    def _fault_garbage(self, body):
        self._send(200, b"<html>\xff not JSON")

    def _fault_truncated(self, body):
        content = json.dumps(self._completion(body)).encode()
        self._send(200, content[: len(content) // 2])

    def _fault_cut(self, body):
        """The connection ends in the middle of the answer."""
        content = json.dumps(self._completion(body)).encode()
        self._send(200, content[: len(content) // 2], claimed=len(content))
        self._fault_reset(body)

    def _fault_empty(self, body):
        self._send(200, json.dumps(self._completion(body) | {"choices": []}).encode())

    def _fault_null(self, body):
        self._changed(body, message={"role": "assistant", "content": None})

    def _fault_number(self, body):
        self._changed(body, message={"role": "assistant", "content": 7})

    def _fault_abort(self, body):
        self._changed(body, finish_reason="abort")

    def _fault_surrogate(self, body):
        self._changed(body, message={"role": "assistant", "content": "half \ud83d"})

    def _fault_busy(self, body):
        self._send(429, b"{}", Retry_After="0")

    def _fault_busy_for_a_second(self, body):
        self._send(429, b"{}", Retry_After="1")

    def _changed(self, body, **changes):
        value = self._completion(body)
        value["choices"][0] |= changes
        self._send(200, json.dumps(value).encode())


FakeServer.handler = FakeHandler


def main() -> None:
    server = FakeServer(port=int(sys.argv[1]))
    server.delay = float(sys.argv[2])
    threading.Event().wait()


if __name__ == "__main__":
    main()
