"""Scale: nothing toy. Sizes that production has and that lie beyond what a kernel was tried with."""
