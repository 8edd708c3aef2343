/** The demo page: a tree of thought on the game of 24, every branch streaming at once. */

import { render } from "preact";
import "./model/settings.js"; // the colours that were chosen in the chat
import { Game } from "./game24/view.jsx";

render(<Game />, document.getElementById("page"));
