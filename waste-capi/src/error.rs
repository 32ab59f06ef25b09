//! What a call ends with, and what it says of a failure.
#![allow(unsafe_code)] // the border: see each function

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use waste_engine::{Coded, Exit};

/// What a call ends with; the numbers are those of the tools' exit codes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// A wrong argument, or an option out of its range.
    Usage = 2,
    /// Bad input: a damaged file, a model that is none, a text that does not fit.
    Data = 3,
    /// Not enough RAM or disk.
    Space = 4,
    /// Locked by another process.
    Locked = 6,
    /// A bug of the library.
    Internal = 70,
    /// Interrupted by waste_cancel before there was a result.
    Interrupted = 130,
}

/// A failure on its way to the caller.
#[derive(Debug)]
pub struct Fault {
    status: Status,
    code: String,
    message: String,
}

impl Fault {
    /// The call is wrong.
    pub fn usage(message: impl Into<String>) -> Fault {
        Fault { status: Status::Usage, code: "usage".to_owned(), message: message.into() }
    }

    /// What was handed in is bad.
    pub fn data(code: &str, message: impl Into<String>) -> Fault {
        Fault { status: Status::Data, code: code.to_owned(), message: message.into() }
    }
}

impl<E: Coded> From<E> for Fault {
    fn from(error: E) -> Fault {
        let status = match error.exit() {
            // Neither is an error, nor does the engine know a network.
            Exit::Done | Exit::No | Exit::Network | Exit::Internal => Status::Internal,
            Exit::Usage => Status::Usage,
            Exit::Data => Status::Data,
            Exit::Space => Status::Space,
            Exit::Locked => Status::Locked,
            Exit::Interrupted => Status::Interrupted,
        };
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let words = error.to_string();
            if !message.contains(&words) {
                message.push_str(": ");
                message.push_str(&words);
            }
            cause = error.source();
        }
        Fault { status, code: error.code().to_owned(), message }
    }
}

thread_local! {
    static LAST: RefCell<(CString, CString)> = RefCell::default();
}

/// Zeros cannot be in a text of C.
fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// Runs the body of a call: keeps what it says of a failure, and lets no panic out.
pub fn guard(body: impl FnOnce() -> Result<(), Fault>) -> Status {
    let fault = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(fault)) => fault,
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            Fault {
                status: Status::Internal,
                code: "internal".to_owned(),
                message: format!("a bug of the library: {said}"),
            }
        }
    };
    // A thread that ends has no storage any more; then nobody asks either.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = (c_text(&fault.message), c_text(&fault.code));
        }
    });
    fault.status
}

/// What the last failed call of this thread says: what was being done, expected and found, and what to do next. Empty
/// if none failed. It belongs to the library, until the next call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn waste_last_error() -> *const c_char {
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.0.as_ptr()))
        .unwrap_or(c"".as_ptr())
}

/// The stable name of the last failure of this thread, such as `budget_below_floor`: the `code` of the tools' JSON.
/// Whose it is: as waste_last_error.
#[unsafe(no_mangle)]
pub extern "C" fn waste_last_error_code() -> *const c_char {
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.1.as_ptr()))
        .unwrap_or(c"".as_ptr())
}

/// A status in words; of any number. It belongs to the library, for ever.
#[unsafe(no_mangle)]
pub extern "C" fn waste_status_text(status: i32) -> *const c_char {
    let text = match status {
        0 => c"done",
        2 => c"wrong argument",
        3 => c"bad input data",
        4 => c"not enough RAM or disk",
        6 => c"locked by another process",
        70 => c"internal error (a bug)",
        130 => c"interrupted",
        _ => c"no status",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> (String, String) {
        // SAFETY: texts of this module, until the next failure.
        let text = |at| unsafe { CStr::from_ptr(at) }.to_str().unwrap().to_owned();
        (text(waste_last_error()), text(waste_last_error_code()))
    }

    #[test]
    fn no_panic_gets_out() {
        assert_eq!(last(), Default::default());
        let panics: [fn() -> Result<(), Fault>; 2] = [|| panic!("at {}", 7), || std::panic::panic_any(3)];
        assert_eq!(guard(panics[0]), Status::Internal);
        assert_eq!(last(), ("a bug of the library: at 7".into(), "internal".into()));
        assert_eq!(guard(panics[1]), Status::Internal);
        assert_eq!(last().0, "a bug of the library: ");
    }

    #[test]
    fn a_failure_stays_with_its_thread() {
        assert_eq!(guard(|| Err(Fault::data("odd", "a\0b"))), Status::Data);
        assert_eq!(last(), ("a\u{fffd}b".into(), "odd".into()));
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(last().1, "odd");
        std::thread::spawn(|| assert_eq!(last(), Default::default())).join().unwrap();
    }

    #[test]
    fn every_status_has_words() {
        for status in [0, 2, 3, 4, 6, 70, 130, 5, -1] {
            // SAFETY: a constant of this module.
            let text = unsafe { CStr::from_ptr(waste_status_text(status)) }.to_str().unwrap();
            assert_eq!(text == "no status", [5, -1].contains(&status));
        }
    }
}
