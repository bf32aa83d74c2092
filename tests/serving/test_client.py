"""What is made of a server's answer, right or wrong."""

import asyncio
import itertools
import json
import time

import pytest

from osprey_jax.decoding.endpoint import Fault, Refused
from osprey_jax.serving.client import SGLangServer
from tests.evaluation.fake_sglang import SPECULATING, FakeSGLang, Handler, answer

PROMPT, LIMIT = [5, 6, 7], 20
IDS = answer(PROMPT, LIMIT)


@pytest.fixture
def ask():
    """What comes of one completion on a server of this handler."""
    started = []

    def call(handler=Handler, **info):
        server = FakeSGLang(**(SPECULATING | info))
        started.append(server)
        server.handler = handler
        server.stop()
        server.start()

        async def complete():
            client = SGLangServer(server.url, 10.0)
            try:
                incremental = bool(info.get("incremental_streaming_output"))
                return await client.complete(PROMPT, LIMIT, speculates=True, incremental=incremental)
            finally:
                await client.close()

        call.server = server
        return asyncio.run(complete())

    yield call
    for server in started:
        server.stop()


def changing(**changes):
    """A handler whose answers have these values, under "meta_info" where it has such a key."""

    def completion(self, body):
        value = Handler._completion(self, body)
        inner = value["meta_info"]
        for key, change in changes.items():
            (inner if key in inner or key.startswith("spec") else value)[key] = change
        return value

    return type("Changing", (Handler,), {"_completion": completion})


def events(*lines):
    """A handler that streams these lines as they are."""

    def answered(self, body):
        self._send(200, b"".join(line + b"\n\n" for line in lines))

    return type("Events", (Handler,), {"_answer": answered})


WRONG = {
    "token ids": [
        {"output_ids": [*IDS[:-1], -1]},  # which tokenizers cannot decode
        {"output_ids": [*IDS[:-1], 2**40]},
        {"output_ids": [*IDS[:-1], True]},
        {"output_ids": {"0": 1}},
        {"text": 5},
    ],
    "verifications are no numbers": [
        {"spec_verify_ct": float("nan")},
        {"spec_verify_ct": -3},
        {"spec_verify_ct": "7"},
        {"spec_correct_drafts_histogram": {"a": 1}},
        {"spec_correct_drafts_histogram": [-5, 2]},
        {"spec_correct_drafts_histogram": [0.5]},
    ],
    "without a verification": [
        {"spec_verify_ct": 0},
        {"spec_verify_ct": None},
    ],  # not one that ended by its first token
    "counts 21 verifications": [{"spec_verify_ct": 21}],  # each gives a token
    "breaks off": [{"finish_reason": None}, {"finish_reason": "stop"}, {"finish_reason": [1]}],
    "ended by": [{"finish_reason": {"type": {"a": [1]}}}, {"finish_reason": {"type": "abort", "message": 5}}],
}


@pytest.mark.parametrize("said, changes", [(said, one) for said, several in WRONG.items() for one in several])
def test_an_answer_that_cannot_be(ask, said, changes):
    """It would be counted, and end the evaluation later or spoil a mean."""
    with pytest.raises(Fault, match=said):
        ask(changing(**changes))


def test_what_a_server_says_is_cut(ask):
    """Its reason stands in a table, on one line."""
    error = {"error": {"message": "no\nroom " * 10_000, "code": 503}}
    with pytest.raises(Fault) as caught:
        ask(events(b"data: " + json.dumps(error).encode()))
    assert str(caught.value).startswith("503: no room no room") and len(str(caught.value)) <= 300
    with pytest.raises(Refused, match=r"refused by the server: 400: too long$"):
        ask(events(b'data: {"error": {"message": "too long", "code": 400}}'))


@pytest.mark.parametrize(
    "lines", [[b"<html>no</html>"], [b"data: [DONE]"], [b"data: [[1]]"], [b"data: null"], [b'data: {"a"'], [b": ping"]]
)
def test_a_stream_of_something_else(ask, lines):
    with pytest.raises(Fault, match="an answer"):
        ask(events(*lines))


def test_what_is_asked(ask):
    """Greedy whatever the model's generation config says, as the other engine decodes."""
    ask()
    sampling = {"temperature": 0, "max_new_tokens": LIMIT, "repetition_penalty": 1.0}
    assert ask.server.bodies == [{"input_ids": PROMPT, "sampling_params": sampling, "stream": True}]


@pytest.mark.parametrize("incremental", [False, True])
def test_the_first_tokens(ask, incremental):
    """When they came, and how many: an event without any is none, those that follow are not the first."""
    cuts = [0, 0, 3, 5, len(IDS)]

    def answered(self, body):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for start, end in itertools.pairwise(cuts):
            start = start if incremental else 0
            self._event(
                self._chunk(body, IDS[:end], done=end == len(IDS)) | {"output_ids": IDS[start:end], "text": "x"}
            )
            time.sleep(0.15)

    served = ask(type("Slow", (Handler,), {"_answer": answered}), incremental_streaming_output=incremental)
    assert served.token_ids == IDS and served.first_tokens == 3
    assert served.text == ("xxxx" if incremental else "x")
    assert served.first > 0.14 and served.seconds > served.first + 0.25


def test_names_of_either_version(ask):
    """0.5.9 calls the histogram otherwise."""

    def completion(self, body):
        value = Handler._completion(self, body)
        value["meta_info"]["spec_accept_histogram"] = value["meta_info"].pop("spec_correct_drafts_histogram")
        return value

    assert ask(type("Older", (Handler,), {"_completion": completion})).histogram == ask().histogram != []


@pytest.mark.parametrize("said", [b"[1]", b'{"status": "ok"}', b"<html>"])
def test_another_program(said):
    """Not every server that says 200 is SGLang."""
    server = FakeSGLang()
    server.handler = type("Other", (Handler,), {"do_GET": lambda self: self._send(200, said)})
    server.stop()
    server.start()

    async def info():
        client = SGLangServer(server.url, 10.0)
        try:
            return await client.info()
        finally:
            await client.close()

    with pytest.raises(Fault, match=r"is it SGLang|not JSON"):
        asyncio.run(info())
    server.stop()


def test_an_answer_of_one_token(ask):
    """The target's own pass wrote it: a server that speculates has nothing to verify then."""
    one = {"output_ids": IDS[:1], "completion_tokens": 1, "spec_verify_ct": None}
    served = ask(changing(**one, spec_correct_drafts_histogram=None))
    assert (served.token_ids, served.verifications, served.histogram) == (IDS[:1], None, None)
