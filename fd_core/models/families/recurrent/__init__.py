"""Families with recurrent layers, whose state is stored in the blocks of attention layers."""
