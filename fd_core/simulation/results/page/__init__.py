"""The page of a report: the packer, and its template, style and scripts."""
