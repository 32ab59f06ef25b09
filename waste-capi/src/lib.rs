//! The engine for C and whatever calls C: `include/waste.h` is made from this crate.
//!
//! [`raw`] is the border: it alone looks through pointers. No panic crosses it, and no error is lost: each function
//! runs in [`error::guard`], which keeps the message for [`error::waste_last_error`].

pub mod error;
pub mod images;
pub mod info;
pub mod model;
pub mod options;
pub mod params;
pub mod raw;
pub mod session;
