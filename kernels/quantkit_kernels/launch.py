"""How kernels are run: on a GPU, or one program after the other in Triton's interpreter.

The interpreter multiplies bit patterns in BF16 dots, is wrong in BF16 arithmetic and in casts to FP8, and has no inline
assembly. A kernel that needs any of these takes ``INTERPRET`` as a constexpr and goes round it.
"""

import triton

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
