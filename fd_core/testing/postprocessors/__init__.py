"""The postprocessor kit: computes token matrices with any postprocessor and compares them with the law.

`fdcore conformance --postprocess NAME` runs it; `docs/write-a-postprocessor.md` shows a whole plugin.
"""
