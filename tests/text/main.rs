//! Text against the programs that define it: `tokenizers` of Python, Jinja2 as `transformers` sets it up.

mod damage;
mod fuzz;
mod templates;
mod tokenizers;
