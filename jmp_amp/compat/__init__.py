"""The APIs of other packages, implemented with jmp_amp."""

from jmp_amp.compat import jmp

__all__ = ["jmp"]
