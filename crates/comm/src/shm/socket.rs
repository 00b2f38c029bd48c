//! A unix socket that keeps messages whole, and can pass an open file. Its name is in Linux's
//! abstract namespace: it goes with the socket, and leaves nothing in the file system.

use std::ffi::OsStr;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Longer messages than these are not sent.
pub(super) const MESSAGE_BYTES_MAX: usize = 4096;

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn address(name: &OsStr) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// Listens under `name`, under which nobody listens yet.
pub(super) fn listen(name: &OsStr) -> Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::bind(&socket, &address(name)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// A connection to who listens under `name`.
pub(super) fn connect(name: &OsStr) -> Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::connect(&socket, &address(name)?)?;
    Ok(socket)
}

pub(super) fn accept(listener: &OwnedFd) -> Result<OwnedFd> {
    rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// Who is at the other end, as the kernel says: the process, and whether it is the same user's.
pub(super) fn peer(socket: &OwnedFd) -> Result<(i32, bool)> {
    let peer = rustix::net::sockopt::socket_peercred(socket)?;
    Ok((peer.pid.as_raw_pid(), peer.uid == rustix::process::geteuid()))
}

/// Sends one message, and `file` with it.
pub(super) fn send(socket: &OwnedFd, message: &[u8], file: Option<&OwnedFd>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file.as_fd()]);
    if let Some(files) = &files {
        assert!(control.push(SendAncillaryMessage::ScmRights(files)), "the space is for one file");
    }
    let message = [IoSlice::new(message)];
    rustix::net::sendmsg(socket, &message, &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Takes the next message, which has arrived; no bytes mean that the other end is closed.
pub(super) fn receive(socket: &OwnedFd) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let into = &mut [IoSliceMut::new(&mut message)];
    let received = rustix::net::recvmsg(socket, into, &mut control, flags)?;
    message.truncate(received.bytes);
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Ok((message, file))
}

/// Waits until one of `sockets` is readable, and returns which are; none are when it is `until`.
pub(super) fn wait(sockets: &[&OwnedFd], until: Instant) -> Result<Vec<bool>> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = left.try_into().map_err(|_| Errno::INVAL)?;
        let flags = PollFlags::IN | PollFlags::RDHUP;
        let mut polled: Vec<_> = sockets.iter().map(|socket| PollFd::new(*socket, flags)).collect();
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => return Ok(polled.iter().map(|p| !p.revents().is_empty()).collect()),
        }
    }
}
