"""Reading compiled HLO: types, loops, names. The lines are as XLA prints them."""

from osprey_jax.planning import hlo

TEXT = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/somewhere/osprey_jax/parallel.py"

FunctionNames
1 "gather_weight"

FileLocations
1 {file_name_id=1 function_name_id=1 line=39 end_line=39 column=14 end_column=14}

StackFrames
7 {file_location_id=1 parent_frame_id=1}


%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %t = (s32[], /*index=1*/bf16[4,8]{1,0}) tuple(%p, %p)
}

ENTRY %main.1 (x: bf16[4,8]) -> f32[2,3] {
  %x = bf16[4,8]{1,0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %loop = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %y = f32[2,3]{1,0} fusion(%x), calls=%fused, metadata={op_name="jit(step)/all_gather" stack_frame_id=7}
}
"""


def test_computations_and_entry():
    """The entry is where a walk begins, and it is not the first computation printed."""
    module = hlo.Module(TEXT)
    assert module.entry == "main.1"
    assert [i.opcode for i in module.computations["body"]] == ["parameter", "tuple"]


def test_an_instruction_says_what_it_runs_and_how_often():
    """A tuple's type has parentheses and commas of its own, and the opcode comes after them."""
    loop = hlo.Module(TEXT).by_name["loop"]
    assert (loop.opcode, loop.trip_count, loop.called) == ("while", 6, ["cond", "body"])


def test_an_instruction_names_its_source():
    """A buffer is known by the line that made it."""
    module = hlo.Module(TEXT)
    assert module.source(module.by_name["y"]) == "parallel.py:39 gather_weight"
    assert module.by_name["y"].op_name == "jit(step)/all_gather"
    assert module.source(module.by_name["x"]) == ""


def test_sizes_of_types():
    """Bits, not letters, say how large an element is; a predicate takes a byte; layouts do not count."""
    assert hlo.size("bf16[4,8]{1,0}") == 64
    assert hlo.size("(f8e4m3fn[16]{0}, pred[3]{0}, s32[], /*index=3*/f32[2,2]{1,0:T(8,128)})") == 16 + 3 + 4 + 16
    assert hlo.size("s4[3]") == 2
    assert hlo.size("token[]") == 0


def test_parts_of_a_tuple():
    """A collective's operands and results are the first and second part of its type."""
    assert hlo.parts("((f32[2,3]{1,0}, f32[]), /*index=1*/f32[4]{0})") == ["(f32[2,3]{1,0}, f32[])", "f32[4]{0}"]
    assert hlo.parts("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
