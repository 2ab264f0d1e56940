"""Structured output: from a schema, a regex, choices or a grammar to masks over the vocabulary, by llguidance.

    output constraint --grammar--> text --GrammarCompiler--> compiled grammar --TokenMatcher--> masks, forced tokens

A mask is a function of the grammar and of the tokens before its position, independent of slots, batches and devices.
"""
