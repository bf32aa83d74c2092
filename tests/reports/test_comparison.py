from osprey_jax.reports.comparison import compare, table


def result(arm, lengths, seconds, prompts="code", concurrency=1):
    requests = [
        {
            "id": f"p{i}",
            "turn": 0,
            "accepted_length": length,
            "seconds": duration,
            "time_to_first_token": None,
            "milliseconds_per_token": None,
        }
        for i, (length, duration) in enumerate(zip(lengths, seconds, strict=True))
    ]
    return {"arm": arm, "prompts": prompts, "concurrency": concurrency, "requests": requests}


RESULTS = [
    result("off", [None] * 3, [4.0, 5.0, 6.0]),
    result("osprey", [3.0, 4.0, 5.0], [1.0, 2.0, 3.0]),
    result("eagle", [2.0, 3.0, 4.0], [2.0, 3.0, 4.0]),
]


def test_pairs_of_arms():
    """Drafters by all they have, each against speculation off by time alone, which is what both have."""
    rows = compare(RESULTS, seed=0)
    assert [(row["arm"], row["against"], row["measure"], row["difference"]) for row in rows] == [
        ("osprey", "eagle", "accepted_length", 1.0),
        ("osprey", "eagle", "seconds", -1.0),
        ("osprey", "off", "seconds", -3.0),
        ("eagle", "off", "seconds", -2.0),
    ]


def test_sets_and_levels_are_never_mixed():
    """Low load and full load are different experiments, and so are code and prose."""
    rows = compare(
        [
            result("off", [None], [4.0]),
            result("a", [2.0], [1.0]),
            result("off", [None], [9.0], concurrency=8),
            result("a", [2.0], [2.0], concurrency=8),
            result("a", [2.0], [2.0], prompts="prose"),
        ],
        seed=0,
    )
    assert [(row["prompts"], row["concurrency"], row["difference"]) for row in rows] == [
        ("code", 1, -3.0),
        ("code", 8, -7.0),
    ]


def test_table_says_which_differences_are_seen():
    """A star where the interval excludes no difference, and words for what was left out."""
    few = result("few", [3.0, 5.0], [0.5, 4.0])
    text = table(compare([RESULTS[0], RESULTS[1], few], seed=0))
    starred = [line for line in text.splitlines() if line.endswith("*")]
    assert [line.split()[:3] for line in starred] == [["osprey", "-", "off"], ["few", "-", "off"]]
    assert "osprey - few, code, seconds: left out are requests, 1 that only osprey has" in text


def test_one_request_has_a_difference_and_no_interval():
    """The table says so, in place of brackets that look like knowledge."""
    text = table(compare([result("off", [None], [4.0]), result("a", [2.0], [1.0])], seed=0))
    assert "-3.000" in text and "none: too few requests" in text


def test_nothing_to_compare():
    """One drafter alone in this process has nobody to be compared with."""
    assert compare([result("a", [2.0], [None])], seed=0) == []
