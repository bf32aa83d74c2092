import pytest

from osprey_jax.reports.decision import decide
from osprey_jax.reports.decision_page import html, markdown
from tests.reports.measured_results import HALF, OFF, asked, busy, costs, failure, measurement


def page(*results, given=None, **fields):
    return markdown(decide(measurement(*results, **fields), costs(**(given or {}))))


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_verdict_comes_first():
    """What to do, what it saves, when it is paid back: before any table, with the numbers of the decision."""
    top = page(OFF, HALF).split("\n## ")[0]
    assert "# Decision sheet: speculative decoding for target" in top
    assert "1 x NVIDIA H200; one request at a time; measured 2026-01-02" in top
    assert "**Serve with osprey.**" in top
    assert "costs 50.0% less than with speculation off (−50.0%): USD 0.005 instead of USD 0.01" in top
    assert "The USD 36.00 spent once are back after 7,200 requests, 2 months" in top
    assert "12 months of 3,600 requests each leave USD 180.00" in top


def test_stay_off():
    """With no drafter to be kept, the reader learns which limit each one broke, by how much."""
    text = page(OFF, HALF, asked("slow", [12.0] * 4), given={"limits": {"p95_seconds": 2}})
    top = text.split("\n## ")[0]
    assert "**Stay with speculation off: no drafter is to be kept.**" in top
    assert "osprey: time until 95% of the answers are complete 6.00 s (within 2 s)" in top
    assert "slow: paid back never (within 12 months); time until" in top
    assert "none: it saves nothing" in text


def test_a_limit_that_is_not_set_is_said_to_be():
    """Silence would read as a limit that was kept."""
    text = page(OFF, HALF, given={"limits": {"p95_seconds": 20}})
    assert "No limit was set on: time until 95% of the answers have begun, answers equal" in text
    limits = section(text, "Limits")
    assert "| within 20 s | 12.0 s | 6.00 s: kept (5.00 to 6.00) |" in limits
    assert limits.count("not set") == 4


def test_doubt_is_said():
    """A verdict that more prompts could turn over is not given as one that they could not."""
    free = {"preparation_gpu_hours": 0, "adaptation_gpu_hours": 0}
    text = page(OFF, asked("osprey", [2.0, 13.0, 4.0, 14.0]), given=free)
    assert "| keep, in doubt |" in text
    assert "The sample leaves doubt about: paid back (few prompts: code 4); more prompts would tell." in text
    text = page(OFF, asked("osprey", [9.0, 13.0, 8.0, 11.0]), given=free)
    assert "**Stay with speculation off" in text
    assert "The sample leaves doubt (few prompts: code 4); more prompts would tell." in text


def test_no_difference_is_said():
    """A change whose interval includes none is not seen, whatever its sign."""
    row = section(page(OFF, asked("osprey", [7.0, 13.0, 10.5, 9.0])), "By prompt set").splitlines()[-1]
    assert row.startswith("| code (100.0% of the traffic) | 4 | 4.00 (4.00) | −1.2%, not seen (")


def test_worse_is_marked_in_every_column():
    """Dearer and slower are bad, and so are fewer tokens; the opposite is not."""
    slow, fast = (
        section(page(OFF, arm), "By prompt set").splitlines()[-1]
        for arm in (asked("b", [16.0, 24.0, 20.0, 20.0]), HALF)
    )
    assert slow.split(" | ")[3:6] == [
        "**+100.0% (+100.0%)**",
        "**−50.0% (−50.0%)**",
        "**+100.0% (+100.0%)**",
    ]
    assert "**" not in fast and "−50.0%" in fast


def test_all_that_failed_and_differed():
    """Reasons are counted, and the first texts that part are shown side by side."""
    parts = {"token": 3, "off": "yes\nno", "this": "maybe"}
    arm = asked("osprey", [1.0, 1.0, 1.0]) | {"failures": [failure("code3", 9.0, reason="HTTP 500 | <down>")]}
    arm["requests"][1] |= {"first_difference": parts, "matches_off": False}
    text = section(page(OFF, busy(arm)), "Requests")
    assert "| osprey | 4 | 3 | 1 | 0 | 0 | 0 | 2 of 3 |" in text
    assert r"| osprey | 1 | HTTP 500 \| \<down\> |" in text
    assert "| osprey | code, code1 | 3 | “yes↵no” | “maybe” |" in text


def test_a_cpu_is_said_to_be_one():
    """Nobody should take a CPU's times for those of the GPUs in the costs."""
    text = page(OFF, HALF, hardware={"device": "cpu", "gpus": None, "cpu": "EPYC"}, given={"gpus": 2})
    assert "On a CPU, not on the 2 GPU(s) that the price is of;" in text
    assert "It was measured on a CPU." in section(text, "What the numbers cannot say")


@pytest.mark.parametrize(
    ("results", "fields", "words"),
    [
        ([OFF, HALF], {}, "Few conversations (code 4)"),
        ([OFF, asked("osprey", [1.0, 1.0])], {}, "left out everywhere: code 2"),
        ([OFF, HALF], {}, "No request was without success with off, osprey: up to 60.2% could be"),
        ([OFF, HALF, asked("off", [1.0], level=8), asked("osprey", [1.0], level=8)], {}, "(8 measured too"),
        ([OFF, HALF], {}, "(the only one measured)"),
        (
            [OFF, HALF],
            {"hardware": {"device": "cuda", "gpus": 1, "servers": {"off": {"dtype": "a"}, "osprey": {"dtype": "b"}}}},
            "differ in more than speculation: dtype",
        ),
        (
            [OFF | {"busy_seconds": 80.0}, HALF],
            {},
            "Fewer than 1 requests ran at one time, on average: off on code 0.5",
        ),
        ([OFF, HALF], {}, "Decoding was greedy"),
    ],
)
def test_what_the_numbers_cannot_say(results, fields, words):
    """Each is said where the measurement shows it."""
    assert words in section(page(*results, **fields), "What the numbers cannot say")


def test_what_does_not_hold_is_not_said():
    """A large measurement on GPUs at its level has no such reservations."""
    big = [asked(arm, [float(i % 7 + 1) for i in range(40)]) for arm in ("off", "osprey")]
    told = {"off": {"dtype": "a"}, "osprey": {"dtype": "a", "speculative_algorithm": "EAGLE3"}}
    hardware = {"device": "cuda", "gpus": 1, "servers": told}
    text = section(page(*big, hardware=hardware), "What the numbers cannot say")
    assert not any(words in text for words in ("Few", "CPU", "left out", "differ in more", "cut by"))


def test_versions_config_and_costs_are_filled_in():
    """Whoever gets the page can repeat the measurement."""
    text = page(OFF, HALF, given={"limits": {"p95_seconds": 20}, "mix": {"code": 1.0}})
    made_of = section(text, "Measured with")
    assert "| sglang | 0.5.23 |" in made_of and "| config.target | models/target |" in made_of
    assert "| config.seed | 0 |" in made_of and "| hardware.gpu | NVIDIA H200 |" in made_of
    given = section(text, "Costs and limits given")
    assert r"| gpu\_hour\_price | 3.6 USD |" in given and r"| requests\_per\_month | 3600 |" in given
    assert r"| limits.p95\_seconds | 20 s |" in given and "| mix.code | 1 |" in given
    assert "| gpus | 1 (from the results) |" in given


def test_the_page_gives_no_secret_away():
    """It is sent on: addresses of servers, and keys that open them, stay behind."""
    results = measurement(OFF, HALF)
    results["config"] |= {
        "servers": {"off": "http://me:pass@host:30000"},
        "sglang_arguments": ["--api-key", "hush1", "--admin-api-key=hush2", "--tp", "4", "--max-total-tokens", "99"],
    }
    decision = decide(results, costs())
    for text in (markdown(decision), html(decision)):
        assert not any(secret in text for secret in ("pass@", "host:30000", "hush"))
        assert "99" in text and "--tp" in text


def test_html_has_the_same_words():
    """One page in two forms."""
    decision = decide(measurement(OFF, HALF), costs())
    text = html(decision)
    for words in ("Serve with osprey.", "7,200", "No request was without success", "gpu_hour_price", "NVIDIA H200"):
        assert words in text
    assert text.count('class="dot"') == 1
    assert "<title>Decision sheet: speculative decoding for target</title>" in text


def test_a_drafter_without_success_has_a_page():
    """Dashes where nothing is defined."""
    dead = asked("osprey", []) | {"failures": [failure(f"code{i}", 3.0) for i in range(4)], "busy_seconds": 12.0}
    decision = decide(measurement(OFF, dead), costs(limits={"p95_seconds": 20, "max_slice_regression": 0.1}))
    text = markdown(decision)
    assert "not measured: broken" in text and "nan" not in text and "None" not in text
    assert "<figure>" not in html(decision), "there is nothing to draw"
