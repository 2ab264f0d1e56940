"""The scheduler kit: drives any scheduler through the public contract, beside an auditor that knows the law.

`fdcore conformance --scheduler NAME` runs it; `docs/write-a-scheduler.md` shows a whole plugin.
"""
