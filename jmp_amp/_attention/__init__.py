"""Calls of a kernel in place of the attention that a program computes op by op, however it is written.

It transforms jaxprs, and knows nothing of `autocast`: a `Scope` says which ops run in the dtype of the kernel.
"""

from jmp_amp._attention._program import AttentionSite, Found, Scope, check_kernel, with_kernel
