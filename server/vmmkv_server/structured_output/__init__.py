"""Structured output: answers that follow a JSON schema, a regular expression, a list of choices or an EBNF grammar.

    wire ──> schema ──> compiler ──> its worker process                    HTTP process
      request fields      Grammar      cache, time limit │ compiled grammar
                                                         v
    matcher (masks) ──> engine.features.grammars (hooks)   engine process

Read `schema` first. `json_schema` writes the grammar of a schema, with `text` for strings and `numerals` for numbers.
`gate` finds the place at which a grammar begins within an answer.
`xgrammar` does the matching (Dong et al., XGrammar, 2024); it is imported with the first grammar.
"""
