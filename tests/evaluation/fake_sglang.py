"""SGLang's own interface on a server that fails on demand; its answers depend on the prompt alone."""

import json
import time

from tests.decoding.fake_server import FakeHandler, FakeServer

VOCAB = 400
INFO = {
    "version": "0.5.23",
    "model_path": "models/target",
    "dtype": "float32",
    "device": "cpu",
    "tp_size": 1,
    "speculative_algorithm": None,
    "incremental_streaming_output": False,
}
SPECULATING = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5, "speculative_draft_model_path": "draft"}


def answer(prompt: list[int], limit: int) -> list[int]:
    """Ids of at most `limit` tokens, fewer for some prompts."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt))
    return [50 + (seed + 7 * i) % (VOCAB - 50) for i in range(min(limit, 6 + seed % 16))]


class Handler(FakeHandler):
    def do_GET(self):
        fake = self.server_fake
        if fake.gone:
            return self._fault_hang(None)
        if self.path == "/health":
            self._send(200, b"")
        elif self._allowed():
            self._send(200, json.dumps(fake.info).encode())

    def _allowed(self):
        key = self.server_fake.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._send(401, b'{"error": "Unauthorized"}')
        return False

    def do_POST(self):
        if not self._allowed():
            return
        if self.path.startswith("/flush_cache"):
            self.server_fake.flushes += 1
            self._flush()
        else:
            super().do_POST()

    def _flush(self):
        self._send(200, b"Cache flushed.")

    def _completion(self, body):
        """The last chunk, which holds everything."""
        return self._chunk(
            body, answer(body.get("input_ids", [1, 2, 3]), body["sampling_params"]["max_new_tokens"]), done=True
        )

    def _chunk(self, body, ids, done=False):
        meta = {"completion_tokens": len(ids), "finish_reason": None}
        if done:
            limit = body["sampling_params"]["max_new_tokens"]
            meta["finish_reason"] = {"type": "length" if len(ids) == limit else "stop"}
            if self.server_fake.info["speculative_algorithm"] and len(ids) > 1:
                verifications = -(-(len(ids) - 1) // 2)
                meta |= {"spec_verify_ct": verifications, "spec_correct_drafts_histogram": [0, verifications]}
                meta["spec_accept_length"] = len(ids) / verifications
        return {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}

    def _answer(self, body):
        """As a stream: the first token, two in the middle, all."""
        if not body.get("stream"):
            return super()._answer(body)
        whole = self._completion(body)
        ids, cuts = whole["output_ids"], (0, 1, 3)
        parts = [self._chunk(body, ids[:cut]) for cut in cuts[1:] if cut < len(ids)] + [whole]
        if self.server_fake.info["incremental_streaming_output"]:
            ends = [0, *(len(part["output_ids"]) for part in parts)]
            for part, start, end in zip(parts, ends, ends[1:], strict=False):
                part["output_ids"] = ids[start:end]
                part["text"] = " ".join(map(str, ids[:end])).removeprefix(" ".join(map(str, ids[:start])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for part in parts:
            time.sleep(self.server_fake.delay)
            self._event(part)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _fault_breaks_off(self, body):
        """The stream ends after its first part, as if that were all."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self._event(self._chunk(body, answer(body["input_ids"], 1)))

    def _fault_abort(self, body):
        self._changed_event(body, finish_reason={"type": "abort", "message": "going down"})

    def _fault_other_count(self, body):
        self._changed_event(body, completion_tokens=1000)

    def _fault_error_event(self, body):
        self._send(200, b'data: {"error": {"message": "no room", "code": 503}}\n\n')

    def _fault_refused_event(self, body):
        self._send(200, b'data: {"error": {"message": "too long", "code": 400}}\n\n')

    def _changed_event(self, body, **changes):
        value = self._completion(body)
        value["meta_info"] |= changes
        self._send(200, b"data: " + json.dumps(value).encode() + b"\n\n")


class FakeSGLang(FakeServer):
    handler = Handler

    def __init__(self, port=0, **info):
        self.info = INFO | info
        self.flushes = 0
        self.key = None  # that requests must carry
        super().__init__(port=port)
