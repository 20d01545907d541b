"""The APIs of other packages, implemented with jmp_amp."""
