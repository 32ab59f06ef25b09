//! The tool with a socket, as a process.

#![allow(dead_code)] // not every file of tests needs all

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use waste_tests::tool::{Ran, process};

pub struct Serving {
    pub child: Child,
    pub address: String,
}

impl Serving {
    /// At a port of its own.
    pub fn start(model: &str, args: &[&str]) -> Serving {
        Serving::listening(model, &[&["--port", "0"], args].concat())
    }

    pub fn listening(model: &str, args: &[&str]) -> Serving {
        let mut command = process("waste-serve");
        command.args([model, "--json"]).args(args).env_remove("WASTE_API_KEY");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
            let mut stderr = String::new();
            child.stderr.as_mut().unwrap().read_to_string(&mut stderr).unwrap();
            panic!("{error}: {line:?} {stderr}")
        });
        assert_eq!((&ready["schema"], &ready["event"]), (&json!("waste-serve/1"), &json!("ready")));
        let address = ready["addr"].as_str().unwrap().trim_start_matches("http://").to_owned();
        Serving { child, address }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        stream
    }

    /// Sends a request; the server closes after its answer.
    pub fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let host = "host: localhost\r\nconnection: close";
        write!(stream, "{head} HTTP/1.1\r\n{host}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        stream
    }

    /// Sends a request and reads until the server closes.
    pub fn ask(&self, head: &str, body: &str) -> String {
        let mut text = String::new();
        self.send(head, body).read_to_string(&mut text).unwrap();
        text
    }

    pub fn end(self) -> Ran {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        Ran::from_output(self.child.wait_with_output().unwrap())
    }
}
