"""Text of a given form: from a schema, a regex, choices or a grammar to masks over the vocabulary, by llguidance.

    what a client asks --grammar--> text --GrammarCompiler--> compiled grammar --TokenMatcher--> masks, forced tokens

A mask is a function of the grammar and of the tokens before its position. No slots, batches or devices are known here.
"""
