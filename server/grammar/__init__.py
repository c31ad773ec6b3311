"""Answers that follow a grammar: JSON of a schema, a regular expression, one of several choices, or an EBNF grammar.

    asked ──> json_schema (limits, what is served) ──> compiler ──> compile_process     the HTTP process and a child of it
      Grammar                                            cache, deadline │ compiled, as text
                                                                         v
    vocabulary ──> matcher ── the mask of the next token; forced ── what can only come next     the engine process

`xgrammar` does the matching (Dong et al., XGrammar, 2024). Whoever asks for no grammar imports none of it.
"""
