"""The plan of a run: which numbers it is made of. Nothing is compiled here: see `test_aot.py`."""

import json
import types

import jax
import pytest

from osprey_jax.benchmark import shapes
from osprey_jax.command import UserError
from osprey_jax.planning import flops, hlo, memory, preflight
from osprey_jax.planning.compiled import CompiledStep, step_of
from osprey_jax.planning.flops import Flops
from osprey_jax.planning.hardware import parse_devices
from osprey_jax.reports.plan import describe
from tests.planning.cases import SMALL, TARGET


@pytest.fixture
def config(tmp_path):
    return shapes.distill_config(
        tmp_path, TARGET, shapes.converted(SMALL, TARGET), rows=4, length=32, accumulation=2, ttt={"loss_chunk": 8}
    )


@pytest.fixture
def fake_compiler(monkeypatch):
    """`fake_compiler(bytes of rows) -> list of tries`: a compiler that needs so much for a number of rows a GPU."""

    def replace(needed):
        tries = []

        def compile_step(config, cluster):
            rows = config.batch_size // config.accumulation // cluster.gpus
            tries.append(rows)
            sizes = {"argument_size_in_bytes": 0, "output_size_in_bytes": 0, "alias_size_in_bytes": 0}
            return types.SimpleNamespace(stats=types.SimpleNamespace(temp_size_in_bytes=int(needed(rows)), **sizes))

        monkeypatch.setattr(preflight, "compile_step", compile_step)
        return tries

    return replace


@pytest.fixture
def plan(config):
    """Of a step that is traced on this machine and "compiled" to three lines."""
    step = step_of(config, jax.devices()[:1])
    sizes = {"argument_size_in_bytes": 3 * 2**30, "output_size_in_bytes": 2**30, "alias_size_in_bytes": 2**30}
    sizes |= {"temp_size_in_bytes": 60 * 2**30, "peak_memory_in_bytes": 62 * 2**30}
    alive = [memory.Buffer(2**30, "frozen['x']", "argument"), memory.Buffer(2**31, "bf16[8] mul", "other")]
    compiled = CompiledStep(
        step=step,
        jaxpr=step.trace().jaxpr.jaxpr,
        module=hlo.Module(
            "ENTRY %main (x: f32[]) -> f32[] {\n"
            "  %a = f32[1024,1024]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add\n"
            "  %b = f32[1024,1024]{1,0} all-gather(%a), replica_groups={{0,1}}\n}\n"
        ),
        stats=types.SimpleNamespace(**sizes),
        alive=alive,
        trace_seconds=1.0,
        compile_seconds=2.0,
    )
    return preflight.preflight(config, parse_devices("1xh100"), compiled, 0.75)


def test_a_plan_is_json(plan):
    """Written as it is, without a number that JSON has not."""
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan


def test_a_plan_says_what_does_not_fit_and_what_would_help(plan):
    """63 GiB of 79: more than JAX takes by default, less than it can be told to take."""
    assert plan["memory"]["needed"] == 63 * 2**30 and not plan["memory"]["fits"]
    text = describe(plan)
    assert "DOES NOT FIT" in text and "XLA_CLIENT_MEM_FRACTION=0.81" in text


def test_a_plan_names_large_all_reduces_and_buffers(plan):
    """What is to be looked at stands in the text, the largest buffer by name."""
    text = describe(plan)
    assert "LARGE ALL-REDUCES: 1 x f32[1024,1024]" in text
    assert "2.00 GiB  bf16[8] mul" in text
    assert plan["largest_arguments"][0]["name"] == "frozen['x']"


def test_a_plan_counts_a_position(plan, config):
    """FLOPs are of one position and depend on the supervised share, what the model needs does not."""
    model, executed = plan["flops_a_position"]["model"], plan["flops_a_position"]["executed"]
    assert plan["flops_a_position"]["ratio"]["products"] == pytest.approx(executed["products"] / model["products"])
    assert plan["flops_a_position"]["ratio"]["products"] < 1
    target = TARGET.num_layers * flops._block(TARGET, TARGET.hidden_size) + TARGET.vocab_size * TARGET.hidden_size
    step = SMALL.num_layers * flops._block(SMALL, 2 * SMALL.hidden_size) + SMALL.vocab_size * SMALL.hidden_size
    fc = 3 * TARGET.hidden_size * SMALL.hidden_size
    assert model["products"] == pytest.approx(2 * target + 4 * fc + 6 * config.ttt.length * step)


@pytest.mark.parametrize(
    "needed, largest",
    [
        (lambda rows: (20 + 3 * rows) * 2**30, 13),
        (lambda rows: (20 + 3 * rows + 0.2 * rows**2) * 2**30, 8),
        (lambda rows: (58 + rows) * 2**30, 1),
        (lambda rows: (60 + rows) * 2**30, 0),
        (lambda rows: (20 + 9 * (rows > 1) + 3.9 * (rows // 4)) * 2**30, 31),
    ],
)
def test_the_largest_number_of_rows_that_fits(config, fake_compiler, needed, largest):
    """Found whatever the curve, and a line, which memory nearly is, takes few compilations."""
    tries = fake_compiler(needed)
    cluster = parse_devices("2xh100")
    shown = []
    found = preflight.largest_rows(config, cluster, lambda *numbers: shown.append(numbers))
    assert [rows for rows, *_ in shown] == tries and len(tries) == len(set(tries)) <= 8
    if not largest:
        assert found is None
        return
    with_rows, compiled = found
    assert (with_rows.batch_size, with_rows.accumulation) == (largest * 2 * 2, 2)
    assert compiled.stats.temp_size_in_bytes == int(needed(largest))
    assert needed(largest) <= preflight._available(cluster) < needed(largest + 1)


def test_the_floor_is_the_slowest_of_what_could_run_at_once(config):
    """Compute, memory and links at their stated peaks, and no step is faster than each of them."""
    config = config.model_copy(update={"compute_dtype": "bfloat16"})
    cluster, step = parse_devices("2xh100"), step_of(config, jax.devices()[:1])
    call = types.SimpleNamespace(nvlink=45e9, network=20e9, count=3)
    floor = preflight._floor(config, cluster, step, Flops(989e11, 989e10), [call])
    assert floor["each"]["compute"] == pytest.approx(0.11)
    assert floor["each"]["nvlink"] == pytest.approx(0.3)
    assert floor["seconds"] == floor["each"]["network"] == pytest.approx(1.2)
    assert floor["bound_by"] == "network"


def test_memory_that_must_move(config):
    """The target's weights once a part but for its embedding, masters and moments in and out once."""
    step = step_of(config, jax.devices()[:1])
    frozen = memory.device_bytes(step.design.frozen) - 4 * TARGET.vocab_size * TARGET.hidden_size
    state = memory.device_bytes((step.state.params, step.state.opt_state))
    assert preflight._moved(config, step) == 2 * frozen + 2 * state


def test_hours_follow_from_steps(config):
    """At 3 s a step on 2 GPUs."""
    cluster = parse_devices("2xh100")
    run = preflight._run(config.model_copy(update={"steps": 600}), cluster, 3.0)
    assert (run["gpu_hours"], run["hours"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert run["gpu_hours_a_1000_steps"] == pytest.approx(1000 * 6 / 3600)
    assert run["gpu_hours_a_billion_positions"] == pytest.approx(1e9 / (4 * 32) * 6 / 3600)


def test_steps_of_epochs_come_from_rows_that_are_there(config, monkeypatch):
    """Three epochs of 10 rows are 7 batches of 4; without prepared rows nothing is made up."""
    epochs, cluster = config.model_copy(update={"steps": None, "epochs": 3}), parse_devices("2xh100")
    assert preflight._run(epochs, cluster, 3.0)["steps"] is None
    monkeypatch.setattr(preflight, "find_prepared", lambda *_: range(10))
    assert preflight._run(epochs, cluster, 3.0)["steps"] == 7


def test_rounds_of_the_loss(config):
    """Chunks of the supervised positions, of which the last may be short."""
    chunked = lambda chunk: config.model_copy(update={"ttt": config.ttt.model_copy(update={"loss_chunk": chunk})})
    assert preflight._loss_rounds(chunked(10), 64, 1.0) == 7
    assert preflight._loss_rounds(chunked(10), 64, 0.5) == 4
    assert preflight._loss_rounds(chunked(512), 64, 0.5) == 1


def test_only_config_files_are_needed(config):
    """And where one is missing, the message says so."""
    (config.target / "config.json").unlink()
    with pytest.raises(UserError, match=r"target/config\.json.*no weights"):
        step_of(config, jax.devices()[:1])


def test_why_the_faster_kernel_is_not_in_use(config):
    """A plan made where tokamax is missing is of another step than a machine with it would run, and says so."""
    compiled = types.SimpleNamespace(step=step_of(config, jax.devices()[:1]))
    assert "compute capability" in preflight._mosaic_needs(config, compiled)
    assert preflight._mosaic_needs(config.model_copy(update={"attention": "xla"}), compiled) is None
