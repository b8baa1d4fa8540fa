"""Every op that amprewrite knows."""

from amprewrite.tables.ops.rows import allow, clear, deny, infer, internal

ROWS = (*allow.ROWS, *internal.ROWS, *infer.ROWS, *clear.ROWS, *deny.ROWS)
