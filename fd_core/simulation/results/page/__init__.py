"""The page of a report: what packs runs into it, and its template, style and scripts."""
