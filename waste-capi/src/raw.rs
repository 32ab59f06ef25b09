//! The border: what C hands over, looked at once.
//!
//! The callers of this library promise what its header says: a pointer is null or points to as much as goes with it,
//! and stays so for the call. What can be checked is checked.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::path::PathBuf;

use crate::error::Fault;

/// Largest struct that is believed.
const STRUCT_BYTES_MAX: usize = 4096;

/// A struct of numbers and pointers that begins with its size in bytes, a `usize`.
///
/// # Safety
/// It is `repr(C)`, its first field is that `usize`, all zeros are a value of it, and it has no padding.
pub unsafe trait Sized0: Copy {
    /// The size in its first field.
    fn size(&self) -> usize;
}

/// Implements [`Sized0`] for structs.
macro_rules! sized {
    ($($name:ty),*) => {$(
        // SAFETY: repr(C), `size` first, then numbers and pointers of eight bytes, and pairs of four: no padding.
        #[allow(unsafe_code)]
        unsafe impl $crate::raw::Sized0 for $name {
            fn size(&self) -> usize {
                self.size
            }
        }
    )*};
}
pub(crate) use sized;

/// A text: `length` bytes of UTF-8 at `bytes`. NULL is no text.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Text {
    /// Where it begins.
    pub bytes: *const c_char,
    /// Its length in bytes.
    pub length: usize,
}

fn null(what: &str) -> Fault {
    Fault::usage(format!("{what} is NULL"))
}

/// The size of a struct of the caller's.
///
/// # Safety
/// `at` points to a `usize`, aligned as one.
unsafe fn size_at<T>(at: *const T, what: &str) -> Result<usize, Fault> {
    // SAFETY: the caller's promise.
    let size = unsafe { at.cast::<usize>().read() };
    if !(size_of::<usize>()..=STRUCT_BYTES_MAX).contains(&size) {
        return Err(Fault::usage(format!("the size of {what} is {size}; set it to sizeof of the struct")));
    }
    Ok(size)
}

/// Reads a struct of the caller's, which may be shorter (of an earlier version: the rest is zero) or longer.
///
/// # Errors
/// Its size is none, or it says something that this version does not know.
///
/// # Safety
/// `at` is null, or aligned for `T` and readable for as many bytes as its first field says.
pub unsafe fn read<T: Sized0>(at: *const T, what: &str) -> Result<T, Fault> {
    let mut value = MaybeUninit::<T>::zeroed();
    if !at.is_null() {
        // SAFETY: the caller's promise.
        let size = unsafe { size_at(at, what)? };
        // SAFETY: readable for `size`, the caller promises; `value` has room for the smaller one.
        unsafe {
            let known = size.min(size_of::<T>());
            at.cast::<u8>().copy_to_nonoverlapping(value.as_mut_ptr().cast(), known);
            let later = std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known);
            if later.iter().any(|byte| *byte != 0) {
                return Err(Fault::usage(format!(
                    "{what} asks for what a later version of the library knows"
                )));
            }
        }
    }
    // SAFETY: all zeros are a `T`, and so are numbers and pointers of the caller's; see `Sized0`.
    Ok(unsafe { value.assume_init() })
}

/// Fills a struct of the caller's, as far as it goes; its size stays.
///
/// # Errors
/// It is null, or its size is none.
///
/// # Safety
/// `at` is null, or aligned for `T` and writable for as many bytes as its first field says.
pub unsafe fn fill<T: Sized0>(at: *mut T, value: &T, what: &str) -> Result<(), Fault> {
    if at.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    let size = unsafe { size_at(at, what)? };
    let skip = size_of::<usize>();
    let known = size.min(size_of::<T>());
    // SAFETY: both are that long; one is the caller's, the other ours.
    unsafe {
        let from = std::ptr::from_ref(value).cast::<u8>().add(skip);
        from.copy_to_nonoverlapping(at.cast::<u8>().add(skip), known - skip);
    }
    Ok(())
}

/// Puts one value.
///
/// # Errors
/// There is no place for it.
///
/// # Safety
/// `at` is null or a place for a `T`.
pub unsafe fn put<T>(at: *mut T, value: T, what: &str) -> Result<(), Fault> {
    if at.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { at.write(value) };
    Ok(())
}

/// Puts as many values as have room, and how many there are.
///
/// # Errors
/// There is no place for their number, or no buffer of that capacity.
///
/// # Safety
/// `at` is null or a place for `capacity` values, `count` null or one for their number.
pub unsafe fn put_all<T: Copy>(
    values: &[T],
    at: *mut T,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Fault> {
    if at.is_null() && capacity > 0 {
        return Err(null("the buffer"));
    }
    // SAFETY: the caller's promise.
    unsafe { put(count, values.len(), "the place for the count")? };
    let fits = values.len().min(capacity);
    if fits > 0 {
        // SAFETY: there is room for `capacity`, and a buffer of the caller's is not our slice.
        unsafe { values.as_ptr().copy_to_nonoverlapping(at, fits) };
    }
    Ok(())
}

/// The values of an array.
///
/// # Errors
/// It is null and not empty, or longer than memory.
///
/// # Safety
/// `at` is null or points to `count` values that do not change while the slice lives.
pub unsafe fn slice<'a, T>(at: *const T, count: usize, what: &str) -> Result<&'a [T], Fault> {
    match count {
        0 => Ok(&[]),
        _ if at.is_null() => Err(null(what)),
        _ if count > isize::MAX as usize / size_of::<T>().max(1) => {
            Err(Fault::usage(format!("{what} cannot have {count} elements")))
        }
        // SAFETY: the caller's promise; the length is possible.
        _ => Ok(unsafe { std::slice::from_raw_parts(at, count) }),
    }
}

/// A text.
///
/// # Errors
/// It is null and not empty, or no UTF-8.
///
/// # Safety
/// As [`slice`].
pub unsafe fn text<'a>(at: *const c_char, length: usize, what: &str) -> Result<&'a str, Fault> {
    // SAFETY: the caller's promise; chars are bytes.
    let bytes = unsafe { slice(at.cast::<u8>(), length, what)? };
    std::str::from_utf8(bytes).map_err(|error| {
        Fault::data(
            "invalid_utf8",
            format!("{what} is not valid UTF-8: byte {} is the first wrong one", error.valid_up_to()),
        )
    })
}

/// A text, if there is one.
///
/// # Errors
/// It is no UTF-8.
///
/// # Safety
/// As [`slice`].
pub unsafe fn optional_text<'a>(text: Text, what: &str) -> Result<Option<&'a str>, Fault> {
    if text.bytes.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { self::text(text.bytes, text.length, what).map(Some) }
}

/// A text that ends with a zero, if there is one.
///
/// # Errors
/// It is no UTF-8.
///
/// # Safety
/// `at` is null or points to bytes of which one is zero.
pub unsafe fn optional_string<'a>(at: *const c_char, what: &str) -> Result<Option<&'a str>, Fault> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(at) };
    let text = bytes.to_str();
    text.map(Some).map_err(|_| Fault::data("invalid_utf8", format!("{what} is not valid UTF-8")))
}

/// A path.
///
/// # Errors
/// It is null, empty or no UTF-8.
///
/// # Safety
/// As [`optional_string`].
pub unsafe fn path(at: *const c_char, what: &str) -> Result<PathBuf, Fault> {
    // SAFETY: the caller's promise.
    match unsafe { optional_string(at, what)? } {
        None => Err(null(what)),
        Some("") => Err(Fault::usage(format!("{what} is empty"))),
        Some(path) => Ok(path.into()),
    }
}

/// What a handle stands for.
///
/// # Errors
/// It is null.
///
/// # Safety
/// `at` is null or was made by [`give`] and not yet [taken back](take).
pub unsafe fn handle<'a, T: Sync>(at: *const T, what: &str) -> Result<&'a T, Fault> {
    // SAFETY: the caller's promise.
    unsafe { at.as_ref() }.ok_or_else(|| null(what))
}

/// Makes a handle.
///
/// # Errors
/// There is no place for it.
///
/// # Safety
/// As [`put`].
pub unsafe fn give<T: Send + Sync>(value: T, at: *mut *mut T, what: &str) -> Result<(), Fault> {
    if at.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { put(at, Box::into_raw(Box::new(value)), what) }
}

/// Takes a handle back.
///
/// # Safety
/// As [`handle`], and nobody uses it any more.
pub unsafe fn take<T: Send + Sync>(at: *mut T) {
    if !at.is_null() {
        // SAFETY: it came from a box, the caller promises.
        drop(unsafe { Box::from_raw(at) });
    }
}
