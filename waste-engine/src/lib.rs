//! The WASTE model engine.


pub mod tokenizer;
