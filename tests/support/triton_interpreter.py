"""Lets Triton kernels run on a CPU in the tests: in Triton's interpreter, with its gaps closed.

To be imported before Triton is, which libraries do where it is installed. Processes that tests start are left as they are.
"""

import os
from pathlib import Path
from typing import Any

HAS_GPU = Path("/dev/nvidiactl").exists()

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

if not HAS_GPU:
    del os.environ["TRITON_INTERPRET"]
    knobs.propagate_env = False
    knobs.runtime.interpret = True

DEVICE = "cuda" if HAS_GPU else "cpu"


def _close_gaps() -> None:
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    binary_op, splat = interpreter.InterpreterBuilder.binary_op, interpreter.InterpreterBuilder.create_splat
    convert = interpreter.InterpreterBuilder.create_fp_to_fp
    narrow = (tl.bfloat16, tl.float8e4nv)
    as_torch = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one element, which numpy 2.4 no longer takes for an int."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """Summed in float64: numpy's library adds up a row in an order of its own by where the row lies, on a GPU each has the same.

        And bfloat16 numbers are kept as their bits, of which the product would be taken.
        """
        if not a.dtype.is_floating():
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        wide = [(self.create_fp_to_fp(x, tl.float32, None) if x.dtype.scalar in narrow else x).data.astype(np.float64) for x in (a, b)]
        return interpreter.TensorHandle(np.matmul(*wide).astype(d.data.dtype) + d.data, d.dtype.scalar)

    def compute(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        """The same of sums and products."""
        if lhs.dtype.scalar != tl.bfloat16:
            return binary_op(self, lhs, rhs, op)
        lhs, rhs = (self.create_fp_to_fp(x, tl.float32, None) for x in (lhs, rhs))
        found = binary_op(self, lhs, rhs, op)
        return self.create_fp_to_fp(found, tl.bfloat16, None)

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        """Whether one number is less than another is a bool, for a whole block too; its type is said to be that of the numbers."""
        found = splat(self, ret_ty, arg)
        return interpreter.TensorHandle(found.data.astype(bool), tl.int1) if arg.data.dtype == bool else found

    def get_bf16(self: Any, value: float) -> Any:
        """What a constant is made of; the only type that is missing."""
        return self.create_fp_to_fp(self.get_fp32(value), tl.bfloat16, None)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """To and from e4m3 as the hardware does it: carries and NaN would be lost."""
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.float8e4nv not in (source, target):
            return convert(self, src, dst_type, rounding_mode)
        converted = torch.from_numpy(np.array(src.data)).view(as_torch[source]).to(as_torch[target])
        bits = converted.view(torch.uint8).numpy().view(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(bits, target)

    # Integers wrap around on a GPU; checking that none does would take a third of the time, and noise is made of those that do.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_splat = create_splat
    interpreter.InterpreterBuilder.binary_op = compute
    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    interpreter.InterpreterBuilder.get_bf16 = get_bf16  # pyright: ignore[reportAttributeAccessIssue]


if not HAS_GPU:
    _close_gaps()
