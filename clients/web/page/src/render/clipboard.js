/** Put a text on the clipboard. @returns {Promise<boolean>} whether the browser allowed it */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
