"""What each socket has seen, is told and is answered; who a session is to those who come."""
