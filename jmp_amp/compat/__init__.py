"""Other packages' surfaces on top of jmp_amp."""
