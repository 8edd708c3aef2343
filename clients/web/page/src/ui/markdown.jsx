/** Markdown in the page's tree of components. */

import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { Answer } from "../render/answer.js";

/** Markdown that grows. The element's content is the renderer's, not the framework's. */
export const Markdown = memo(({ text, final }) => {
  const element = useRef(null);
  const answer = useRef(null);
  useLayoutEffect(() => {
    answer.current ??= new Answer(element.current);
    answer.current.show(text, final);
  }, [text, final]);
  useEffect(() => () => answer.current?.show("", true), []);
  return <div class="text" dir="auto" ref={element} />;
});
