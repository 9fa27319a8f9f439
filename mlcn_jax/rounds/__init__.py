"""Local rounds: workers that hardly talk train one model, each some steps by itself before their changes meet.

Source: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo), section 2, algorithm 1.
"""
