"""The waiting queue, and admission from it."""
