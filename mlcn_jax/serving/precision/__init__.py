"""Lanes in float32, bfloat16 and int8: made, timed, mixed, placed on devices, and written as an export."""
